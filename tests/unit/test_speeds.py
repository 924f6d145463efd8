"""Speeds of ranks: what is accepted, and what becomes of shares and micro-batches."""

from __future__ import annotations

import random
from typing import Any

import pytest

from nemo_uneven_tp.costs import cell_time, rank_time
from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.layout_options import LayoutOptions
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.planner import PlanRequest, make_plan
from nemo_uneven_tp.shares import Axis, even_boundaries, weighted_boundaries
from nemo_uneven_tp.speeds import cell_speeds, speed_table
from tests.shapes import LLAMA3_8B


def plan(speeds: Any, tp: int = 4, replicas: int = 2, **fields: Any) -> Plan:
    return make_plan(
        PlanRequest(
            model=LLAMA3_8B,
            tensor_model_parallel_size=tp,
            world_size=tp * replicas,
            global_batch_size=64,
            micro_batch_size=1,
            options=LayoutOptions(rank_speeds=speeds),
            **fields,
        )
    )


def test_tables_and_lists_mean_the_same() -> None:
    assert speed_table({3: 0.7, 1: 1.0}, 4) == speed_table([1, 1, 1, 0.7], 4) == {3: 0.7}
    assert speed_table(None, 4) == {}
    assert cell_speeds({3: 0.7}, (0, 1)) == ()
    assert cell_speeds({3: 0.7}, (2, 3)) == (1.0, 0.7)


@pytest.mark.parametrize(
    "value",
    [
        [1.0],
        {4: 1.0},
        {-1: 1.0},
        {0: 0},
        {0: -1},
        {0: "fast"},
        {0: True},
        "quick",
        3,
        {0: float("inf")},
    ],
)
def test_bad_speeds_are_refused_in_one_sentence(value: Any) -> None:
    with pytest.raises(UserError, match=r"uneven_tp\.rank_speeds"):
        speed_table(value, 4)


@pytest.mark.parametrize("seed", range(20))
def test_weighted_shares(seed: int) -> None:
    """Within one unit of the exact quota where no minimum binds; equal weights: even shares."""
    rng = random.Random(seed)
    weights = [rng.choice([0.0, 0.5, 0.8, 1.0, 1.3]) for _ in range(rng.randint(1, 9))]
    weights.append(1.0)
    units = rng.randint(200, 900)
    boundaries = weighted_boundaries(units, weights, minimum=1)
    assert (boundaries[0], boundaries[-1]) == (0, units)
    for i, weight in enumerate(weights):
        assert abs(boundaries[i + 1] - boundaries[i] - units * weight / sum(weights)) < 1
    assert weighted_boundaries(units, (1.0,) * 7) == even_boundaries(units, 7)


def test_shares_and_micro_batches_follow_speeds() -> None:
    slow = plan({6: 0.5}, tp=2, replicas=4)
    cell = slow.cells[3]
    ffn = [len(cell.share(Axis.FFN, i)) for i in range(2)]

    assert ffn == [14336 - 9557, 9557]
    assert [len(cell.share(Axis.QUERY_GROUP, i)) for i in range(2)] == [3, 5]
    assert slow.micro_batches[3] < slow.micro_batches[0]
    assert sum(slow.micro_batches) == 64
    even = plan(None, tp=2, replicas=4)
    assert cell_time(LLAMA3_8B, cell) > cell_time(LLAMA3_8B, even.cells[3])
    left_alone = rank_time(LLAMA3_8B, even.cells[3], 0) / 0.5
    assert rank_time(LLAMA3_8B, cell, 0) < 0.8 * left_alone


def test_only_ratios_matter_and_plans_travel() -> None:
    slow = plan([2.0] * 7 + [1.0])
    assert slow.cells[1].shares == plan({7: 0.5}).cells[1].shares
    assert Plan.from_json(slow.to_json()) == slow


def test_a_failed_rank_may_have_a_speed() -> None:
    """A table outlives the layout it was measured in."""
    assert plan({7: 0.5}, failed_ranks=[7]).cells[1].speeds == ()
