"""Memory and groups at their bounds, counted from real tensors."""

from __future__ import annotations

import pytest

from nemo_uneven_tp.model_shape import parameters
from nemo_uneven_tp.shares import Axis
from tests.dist.parity import Case, draw_case
from tests.dist.runs import memory_of, small_case
from tests.distributed import RankPool

ADAM_BYTES = 12  # fp32 main parameter and two moments


def shard_elements(case: Case, rank: int) -> int:
    """Elements the rank takes to gradient sync: its share, for leaders the replicated too."""
    plan = case.plan()
    cell, tp_rank = plan.location(rank)
    own = 0
    for parameter in parameters(plan.model, plan.vocab_size):
        if parameter.cut is not None:
            own += parameter.elements(len(cell.share(parameter.cut.axis, tp_rank)))
        elif tp_rank == 0:
            own += parameter.elements()
    return own


@pytest.mark.parametrize("overlap", [False, True], ids=["one_bucket", "many_buckets"])
def test_optimizer_state_and_staging(ranks: RankPool, overlap: bool) -> None:
    """State: shard x 12 / replicas within a padding unit per group; staging: one bucket."""
    case = small_case(
        (3, 1, 2),
        num_query_groups=5,
        num_attention_heads=5,
        precision="bf16",
        distributed_optimizer=True,
        overlap=overlap,
        bucket_size=600 if overlap else None,
        steps=2,
    )
    plan = case.plan()
    for rank, memory in enumerate(ranks.run(memory_of, plan.world_size, case=case)):
        ideal = shard_elements(case, rank) / plan.replicas
        slack = memory["packed_buffers"]  # of each, this rank's part may be a unit above the mean
        assert abs(memory["optimizer"] / ADAM_BYTES - ideal) <= slack
        padding = 4 * plan.replicas * memory["packed_buffers"]
        assert memory["staging"] <= memory["largest_bucket"] + padding
        assert memory["gradients"] == 4 * memory["parameters"]
        assert memory["buckets"] > 2 if overlap else memory["buckets"] == 2
        if overlap:
            assert memory["staging"] < memory["gradients"] / 2


@pytest.mark.parametrize("seed", range(200))
def test_number_of_sync_groups_is_bounded(seed: int) -> None:
    """At most one per distinct share boundary, plus min(t)."""
    plan = draw_case(seed, max_world=16).plan()
    boundaries = {
        (axis, point) for cell in plan.cells for axis in Axis for point in cell.shares[axis]
    }
    assert len(plan.sync_groups) <= len(boundaries) + min(plan.degrees)
