"""Counts computed from plans: at their bounds, and quick for large jobs."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from nemo_uneven_tp.bench.counts import (
    Settings,
    rank_counts,
    reshard_first_counts,
    summary,
)
from nemo_uneven_tp.model_shape import parameters
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.planner import PlanRequest, make_plan
from tests.shapes import LLAMA3_70B

BF16 = Settings(parameter_bytes=2, gradient_bytes=4, use_distributed_optimizer=True)


def llama(replicas: int, *failed: int) -> Plan:
    return make_plan(
        PlanRequest(
            model=LLAMA3_70B,
            tensor_model_parallel_size=8,
            world_size=8 * replicas,
            global_batch_size=4 * replicas,
            micro_batch_size=1,
            failed_ranks=failed,
        )
    )


def random_plan(seed: int) -> Plan:
    rng = random.Random(seed)
    degrees = [rng.randint(1, 4) for _ in range(rng.randint(2, 5))]
    shape = replace(
        LLAMA3_70B,
        num_layers=2,
        hidden_size=16,
        num_attention_heads=8,
        num_query_groups=rng.choice([4, 8]),
        kv_channels=4,
        ffn_hidden_size=rng.randint(4, 99),
        vocab_size=rng.randint(9, 99),
        seq_length=8,
        gated_linear_unit=rng.random() < 0.5,
        make_vocab_size_divisible_by=1,
    )
    return make_plan(
        PlanRequest(
            model=shape,
            tensor_model_parallel_size=4,
            world_size=4 * len(degrees),
            global_batch_size=3 * len(degrees),
            micro_batch_size=1,
            degrees=degrees,
        )
    )


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "distributed"])
def test_bounds_hold_for_random_plans(seed: int, sharded: bool) -> None:
    plan = random_plan(seed)
    settings = replace(BF16, use_distributed_optimizer=sharded, bucket_size=500)
    if plan.is_uniform:
        pytest.skip("stock Megatron pads more")
    for rank in rank_counts(plan, settings):
        padding = (plan.replicas - 1) * rank.grad_sync_calls if sharded else 0
        assert rank.grad_sync_bytes <= rank.shard_bytes + 4 * padding
        elements = rank.shard_bytes / 4 / (plan.replicas if sharded else 1)
        if sharded:
            assert rank.optimizer_bytes <= 12 * (elements + rank.grad_sync_calls)
        assert rank.staging_bytes <= rank.gradient_bytes + 4 * plan.replicas * 99
    report = summary(plan, settings, rank_counts(plan, settings))
    assert report["sync_groups"] <= report["sync_groups_bound"]
    if not sharded:
        assert report["grad_sync_bytes_over_shard"] == 1.0


def test_shards_of_a_replica_make_up_the_model() -> None:
    plan = llama(4, 5, 9, 10)
    sharded = sum(p.elements() for p in parameters(plan.model, plan.vocab_size) if p.cut)
    replicated = sum(p.elements() for p in parameters(plan.model, plan.vocab_size) if not p.cut)
    ranks = rank_counts(plan, BF16)
    for cell in plan.cells:
        held = sum(r.shard_bytes for r in ranks if r.replica == cell.replica)
        assert held == 4 * (sharded + cell.degree * replicated)
    state = sum(r.optimizer_bytes for r in ranks)
    assert state == 12 * (sharded + replicated)  # every element has its state exactly once


def test_llama_70b_on_4000_ranks_is_counted_in_seconds() -> None:
    start = time.perf_counter()
    plan = llama(500, 3, 77, 78, 1000)
    report = summary(plan, BF16, rank_counts(plan, BF16))
    peer = reshard_first_counts(plan, BF16)
    assert time.perf_counter() - start < 20
    assert len(report["ranks"]) == 3996
    assert report["grad_sync_bytes_over_shard"] == pytest.approx(1.0, abs=1e-4)
    assert report["param_gather_bytes_over_shard"] == pytest.approx(1.0, abs=1e-4)
    assert report["optimizer_bytes_over_bound"] == pytest.approx(1.0, abs=1e-4)
    assert peer.grad_sync_bytes_over_shard > 1.3  # 8 / 6, and the replicated parameters
    assert peer.all_to_all_bytes > 0


def test_nothing_failed_needs_no_resharding() -> None:
    peer = reshard_first_counts(llama(2), BF16)
    assert peer.all_to_all_bytes == peer.side_buffer_bytes == 0
    assert peer.grad_sync_bytes_over_shard == 1.0
