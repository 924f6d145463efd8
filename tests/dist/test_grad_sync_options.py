"""What Megatron lets users set about gradient sync and the optimizer, over uneven replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig

from nemo_uneven_tp.distributed_data_parallel import refuse_unsupported as refuse_ddp
from nemo_uneven_tp.distributed_optimizer import refuse_unsupported as refuse_optimizer
from nemo_uneven_tp.errors import UnsupportedError
from tests.dist.parity import canonical, fingerprint, loss_curve, run_stock, run_uneven
from tests.dist.runs import small_case
from tests.distributed import RankPool

OPTIONS: dict[str, dict[str, Any]] = {
    "accumulation": {"global_batch_size": 7},
    "overlap_one_parameter_per_bucket": {"overlap": True, "bucket_size": 1},
    "overlap_both_ways": {"overlap": True, "bucket_size": 300, "overlap_param_gather": True},
    "gather_overlapped_alone": {"bucket_size": 300, "overlap_param_gather": True},
    "average_in_collective": {"average_in_collective": True},
    "sgd_without_clipping": {"optimizer": "sgd", "clip_grad": 0.0},
    "hard_clipping": {"clip_grad": 0.01, "overlap": True},
    "biases_are_not_decayed": {
        "add_bias_linear": True,
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
    },
    "tied_embeddings": {
        "share_embeddings_and_output_weights": True,
        "position_embedding_type": "learned_absolute",
        "overlap_param_gather": True,
    },
}


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("option", OPTIONS)
def test_option_trains_like_stock(ranks: RankPool, option: str, distributed: bool) -> None:
    """Losses, norms and parameters of stock on one process, zeros in gradients included."""
    case = small_case((3, 2), num_query_groups=5, num_attention_heads=10, steps=6)
    shape = {k: v for k, v in OPTIONS[option].items() if hasattr(case.shape, k)}
    rest = {k: v for k, v in OPTIONS[option].items() if k not in shape}
    # 25 rows make dummies in both cells, which must not be counted as zeros.
    shape |= {"vocab_size": 25, "make_vocab_size_divisible_by": 1}
    case = replace(case, shape=replace(case.shape, **shape), log_num_zeros=True, **rest)
    case = replace(case, distributed_optimizer=distributed)
    plan = case.plan()
    (stock,) = ranks.run(run_stock, 1, case=replace(case, average_in_collective=False))
    uneven = ranks.run(run_uneven, plan.world_size, case=case)
    expected = [total / tokens for total, tokens in stock["losses"]]
    assert loss_curve(plan, uneven) == pytest.approx(expected, rel=1e-5)
    finals = [canonical(plan, r, [x["final"] for x in uneven]) for r in range(plan.replicas)]
    assert len({fingerprint(final) for final in finals}) == 1
    # Adam divides by the size of gradients: one near zero makes 1% of a step (lr 1e-2) of noise.
    for name, weight in stock["final"].items():
        torch.testing.assert_close(finals[0][name], weight, rtol=2e-3, atol=1e-4, msg=name)
    for report in uneven:
        assert report["grad_norms"] == pytest.approx(stock["grad_norms"], rel=1e-4)
        assert report["zeros"] == stock["zeros"]
    if not case.shape.share_embeddings_and_output_weights:
        assert max(stock["zeros"]) > 0  # rows of tokens that a batch does not hold


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_precision_aware_optimizer", True),
        ("optimizer_cpu_offload", True),
        ("overlap_param_gather_with_optimizer_step", True),
        ("optimizer", "muon"),
    ],
)
def test_unsupported_optimizer_features_are_refused_by_name(field: str, value: object) -> None:
    config = OptimizerConfig(lr=1e-3)
    setattr(config, field, value)
    with pytest.raises(UnsupportedError, match=rf"optim\.{field}={value} .*(set it to|use) "):
        refuse_optimizer(config)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_distributed_optimizer_instances", 2),
        ("fp8_param_gather", True),
        ("use_megatron_fsdp", True),
        ("average_in_collective", True),
    ],
)
def test_unsupported_ddp_features_are_refused_by_name(field: str, value: object) -> None:
    config = DistributedDataParallelConfig()
    setattr(config, field, value)
    model = type("Model", (), {"calculate_per_token_loss": True})()
    with pytest.raises(UnsupportedError, match=rf"strategy\.ddp\.{field}={value} "):
        refuse_ddp(model, config)
