"""Plans of large jobs: seconds, not minutes, and no more work than there are groups."""

from __future__ import annotations

import time

from nemo_uneven_tp.parallel_state import group_ranks
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.planner import PlanRequest, make_plan
from tests.shapes import LLAMA3_8B


def plan_and_groups(replicas: int, degrees: tuple[int, ...]) -> tuple[Plan, int, float]:
    """A TP8 plan whose first replicas have ``degrees``; its groups; seconds it all took."""
    start = time.perf_counter()
    plan = make_plan(
        PlanRequest(
            model=LLAMA3_8B,
            tensor_model_parallel_size=8,
            world_size=8 * replicas,
            global_batch_size=4 * replicas,
            micro_batch_size=1,
            degrees=degrees + (8,) * (replicas - len(degrees)),
        )
    )
    groups = group_ranks(plan)
    assert Plan.from_json(plan.to_json()).digest == plan.digest
    return plan, len(groups), time.perf_counter() - start


def test_4000_ranks_take_less_than_two_seconds() -> None:
    plan, groups, seconds = plan_and_groups(500, (7, 6, 5))
    assert plan.world_size == 3994
    assert groups <= plan.replicas + len(plan.sync_groups) + min(plan.degrees)
    assert seconds < 2.0


def test_groups_do_not_grow_with_replicas_of_known_degrees() -> None:
    """64 replicas of 3 degrees: as many sync groups as 4 replicas of the same 3 degrees."""
    few, few_groups, _ = plan_and_groups(4, (7, 6))
    many, many_groups, _ = plan_and_groups(64, (7, 6))
    assert len(many.sync_groups) == len(few.sync_groups)
    assert many_groups - few_groups == 60  # the cells
    counted: list[int] = []
    for plan in (few, many):
        counted.append(max(sum(r in ranks for ranks in group_ranks(plan)) for r in range(30)))
    assert counted[0] == counted[1]  # groups a rank is in


def test_time_per_group_stays_flat() -> None:
    """Twice the replicas take about twice as long: nothing is quadratic in the ranks."""
    plan_and_groups(32, (7, 6))
    _, _, small = min((plan_and_groups(250, (7, 6)) for _ in range(3)), key=lambda x: x[2])
    _, _, large = min((plan_and_groups(1000, (7, 6)) for _ in range(3)), key=lambda x: x[2])
    assert large < 4 * 2.5 * small
