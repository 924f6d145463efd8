"""The bench counts what is really sent and held, and its peers do the same work."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import pytest
import torch

from nemo_uneven_tp import cpu_mode
from nemo_uneven_tp.bench.counts import RankCounts, rank_counts, reshard_first_counts
from nemo_uneven_tp.bench.model import Trainee
from nemo_uneven_tp.bench.ranks import count
from nemo_uneven_tp.bench.reshard_first import ReshardFirst
from nemo_uneven_tp.bench.run import settings_of, undamaged_plan
from nemo_uneven_tp.config.compose import compose
from nemo_uneven_tp.config.request import plan_of
from nemo_uneven_tp.config.validate import Config, checked
from nemo_uneven_tp.parallel_state import (
    destroy_uneven_model_parallel,
    initialize_uneven_model_parallel,
)
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.wire import count_traffic
from tests.distributed import RankPool

TINY = (
    "model.num_layers=2",
    "model.hidden_size=20",
    "model.num_attention_heads=8",
    "model.num_query_groups=4",
    "model.kv_channels=4",
    "model.ffn_hidden_size=37",
    "model.seq_length=8",
    "model.make_vocab_size_divisible_by=1",
    "data.micro_batch_size=1",
    "strategy.tensor_model_parallel_size=4",
    "trainer.devices=12",
)
UNEVEN = "uneven_tp.degrees=[4,2,1]"
CONFIGS: dict[str, tuple[str, ...]] = {
    "plain": (UNEVEN, "optim.use_distributed_optimizer=false"),
    "distributed": (UNEVEN, "optim.use_distributed_optimizer=true"),
    "bf16_buckets": (
        UNEVEN,
        "trainer.precision=bf16-mixed",
        "optim.use_distributed_optimizer=true",
        "strategy.overlap_grad_reduce=true",
        "strategy.overlap_param_gather=true",
        "strategy.bucket_size=900",
    ),
    "bf16_narrow_gradients": (
        UNEVEN,
        "trainer.precision=bf16-mixed",
        "strategy.grad_reduce_in_fp32=false",
        "optim.use_distributed_optimizer=true",
        "optim.optimizer=sgd",
    ),
    "bf16_plain": (
        UNEVEN,
        "trainer.precision=bf16-mixed",
        "optim.use_distributed_optimizer=false",
        "model.share_embeddings_and_output_weights=true",
        "model.position_embedding_type=learned_absolute",
        "model.normalization=LayerNorm",
        "model.gated_linear_unit=false",
        "model.add_bias_linear=true",
    ),
    "sequence_parallel": (
        UNEVEN,
        "strategy.sequence_parallel=true",
        "model.qk_layernorm=true",
        "optim.use_distributed_optimizer=true",
    ),
    "uniform": ("trainer.devices=4", "strategy.tensor_model_parallel_size=2"),
    "uniform_distributed": (
        "trainer.devices=6",
        "strategy.tensor_model_parallel_size=2",
        "optim.use_distributed_optimizer=true",
        "trainer.precision=bf16-mixed",
        "strategy.overlap_grad_reduce=true",
        "strategy.bucket_size=3000",
        "model.ffn_hidden_size=38",
        "model.make_vocab_size_divisible_by=4",
    ),
    "uniform_with_dummies": (
        "trainer.devices=4",
        "strategy.tensor_model_parallel_size=2",
        "model.reference_tensor_parallel_size=1",
        "optim.use_distributed_optimizer=true",
    ),
}


def config_of(*overrides: str) -> Config:
    composed = compose("test", [*TINY, "data.global_batch_size=6", *overrides])
    assert composed is not None
    return checked(composed)


@pytest.mark.parametrize("name", CONFIGS)
def test_computed_counts_are_the_measured_ones(ranks: RankPool, name: str) -> None:
    config = config_of(*CONFIGS[name])
    plan = plan_of(config)
    computed = rank_counts(plan, settings_of(config))
    measured = ranks.run(count, plan.world_size, config=config, plan=plan)
    names = {field.name for field in fields(RankCounts)} & set(measured[0])
    assert len(names) == 8
    for expected, actual in zip(computed, measured, strict=True):
        assert {n: actual[n] for n in names} == {n: asdict(expected)[n] for n in names}


def reshard_and_compare(config: Config, plan: Plan) -> dict[str, Any]:
    """Sums by both schemes of the same random gradients, and the traffic of reshard-first."""
    cpu_mode.activate()
    state = initialize_uneven_model_parallel(plan)
    try:
        trainee = Trainee(config, plan, state.cell.replica, stock=False)
        named = list(trainee.model.named_parameters())
        generator = torch.Generator().manual_seed(state.rank)
        rows = len(state.cell.share(list(state.cell.shares)[-1], state.tp_rank))
        gradients = {}
        for name, parameter in named:
            gradient = torch.randn(parameter.shape, generator=generator)
            if "word_embeddings" in name or "output_layer" in name:
                gradient[rows:] = 0  # dummies
            if "norm" in name:
                gradient.fill_(state.cell.replica + 1.0)  # equal inside a cell
            gradients[name] = gradient
        sums = []
        peer = ReshardFirst(named, state, trainee.chunk.bucket_groups[0].scale)
        for sync in (trainee.chunk.finish_grad_sync, peer.sync):
            for name, parameter in named:
                parameter.main_grad.copy_(gradients[name])
            with count_traffic() as traffic:
                sync()
            sums.append({name: parameter.main_grad.clone() for name, parameter in named})
        return {
            "sums": sums,
            "all_to_all": traffic.nbytes("all_to_all"),
            "all_reduce": traffic.nbytes("all_reduce"),
            "side_buffer": peer.side_buffer_bytes,
        }
    finally:
        destroy_uneven_model_parallel()


@pytest.mark.parametrize("degrees", ["[4,2,1]", "[3,4,2]"])
def test_reshard_first_gives_the_same_sums_for_more_bytes(ranks: RankPool, degrees: str) -> None:
    config = config_of(f"uneven_tp.degrees={degrees}", "optim.use_distributed_optimizer=false")
    plan = plan_of(config)
    settings = settings_of(config)
    reports = ranks.run(reshard_and_compare, plan.world_size, config=config, plan=plan)
    for report in reports:
        by_segments, reshard_first = report["sums"]
        for name, total in by_segments.items():
            torch.testing.assert_close(reshard_first[name], total, rtol=1e-5, atol=1e-5, msg=name)
    counts = reshard_first_counts(plan, settings)
    shards = [r.shard_bytes for r in rank_counts(plan, settings)]
    over = [r["all_reduce"] / shard for r, shard in zip(reports, shards, strict=True)]
    assert max(over) == pytest.approx(counts.grad_sync_bytes_over_shard)
    assert max(over) > 0.8 * max(plan.degrees) / min(plan.degrees)
    assert max(r["all_to_all"] for r in reports) == counts.all_to_all_bytes
    assert max(r["side_buffer"] for r in reports) == counts.side_buffer_bytes


def test_the_undamaged_plan_is_the_stock_layout() -> None:
    plan = undamaged_plan(config_of("uneven_tp.failed_ranks=[3,6]", "model.ffn_hidden_size=36"))
    assert plan.is_uniform
    assert plan.degrees == (4, 4, 4)
    assert plan.failed_ranks == ()
