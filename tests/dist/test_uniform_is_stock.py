"""Nothing failed: losses, gradient norms and parameters are stock Megatron's, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.dist.parity import run_stock, run_uneven
from tests.dist.runs import small_case
from tests.distributed import RankPool


@pytest.mark.parametrize(("degree", "replicas"), [(2, 2), (1, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("overlap", [False, True], ids=["in_turn", "overlap"])
def test_uniform_plan_is_stock_bit_for_bit(
    ranks: RankPool, degree: int, replicas: int, distributed: bool, overlap: bool
) -> None:
    groups = 6 if degree == 3 else 2
    case = small_case(
        (degree,) * replicas,
        num_query_groups=groups,
        num_attention_heads=2 * groups,
        global_batch_size=2 * replicas,
        steps=4,
        reference=degree,
        distributed_optimizer=distributed,
        overlap=overlap,
        overlap_param_gather=overlap and distributed,
        bucket_size=500 if overlap else None,
        precision="bf16" if distributed and not overlap else "fp32",
    )
    assert case.plan().is_uniform
    world = degree * replicas
    stock = ranks.run(run_stock, world, case=case, degree=degree, distributed=distributed)
    ours = ranks.run(run_uneven, world, case=replace(case))
    for expected, actual in zip(stock, ours, strict=True):
        assert actual["losses"] == expected["losses"]
        assert actual["grad_norms"] == expected["grad_norms"]
        assert actual["final"].keys() == expected["final"].keys()
        for name, weight in expected["final"].items():
            assert torch.equal(actual["final"][name], weight), name
