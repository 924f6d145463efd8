"""Which ranks a supervised job goes on without, against the planner's own view of replicas."""

from __future__ import annotations

import random

import pytest

from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.planner import PlanRequest, make_plan
from nemo_uneven_tp.supervise.policy import POLICIES, FailedRanks, Failure
from tests.shapes import LLAMA3_8B


def request(replicas: int, stages: int = 1, degree: int = 4, **fields: object) -> PlanRequest:
    return PlanRequest(
        model=LLAMA3_8B,
        tensor_model_parallel_size=degree,
        pipeline_model_parallel_size=stages,
        world_size=degree * stages * replicas,
        global_batch_size=4 * replicas,
        micro_batch_size=1,
        **fields,  # type: ignore[arg-type]
    )


def after(policy: str, first: PlanRequest, *ranks: int) -> PlanRequest:
    failed = FailedRanks(policy)
    failed.record(Failure(ranks=ranks, of_hardware=True))
    return failed.request(first)


@pytest.mark.parametrize("seed", range(30))
def test_policies_on_random_failures(seed: int) -> None:
    rng = random.Random(seed)
    first = request(rng.randint(2, 5), stages=rng.choice([1, 2]))
    rank = rng.randrange(first.world_size)
    uneven, dropped = (make_plan(after(p, first, rank)) for p in ("uneven", "drop_replica"))
    assert uneven.failed_ranks == (rank,)
    assert uneven.dropped_replicas == ()
    home = {cell.replica for cell in make_plan(first).cells if rank in cell.nominal_ranks}
    assert set(dropped.dropped_replicas) == home
    assert dropped.world_size == first.world_size - first.world_size // (
        uneven.nominal_world_size // (4 * first.pipeline_model_parallel_size)
    )
    assert after("wait", first, rank) == first


@pytest.mark.parametrize("policy", POLICIES)
def test_software_errors_leave_no_rank_out(policy: str) -> None:
    failed = FailedRanks(policy)
    for _ in range(3):
        failed.record(Failure(ranks=(0, 1, 2, 3), of_hardware=False))
    assert failed.request(request(2)) == request(2)


def test_a_rank_is_left_out_at_the_given_count() -> None:
    failed = FailedRanks("uneven", exclude_after=2)
    failed.record(Failure(ranks=(3, 3, 5), of_hardware=True))
    assert failed.broken() == ()
    failed.record(Failure(ranks=(3,), of_hardware=True))
    assert failed.broken() == (3,)


def test_ranks_that_were_out_before_stay_out() -> None:
    first = request(3, failed_ranks=(1,))
    assert after("uneven", first, 6).failed_ranks == (1, 6)
    assert after("wait", first, 6) == first
    assert FailedRanks("drop_replica").request(first).failed_ranks == (0, 1, 2, 3)


def test_too_little_left_is_the_planners_sentence() -> None:
    with pytest.raises(UserError, match="no rank"):
        make_plan(after("drop_replica", request(2), 0, 7))


def test_bad_values() -> None:
    with pytest.raises(UserError, match=r"supervise\.policy=shrink must be one of uneven, "):
        FailedRanks("shrink")
    with pytest.raises(UserError, match=r"supervise\.exclude_after=0 must be at least 1"):
        FailedRanks("uneven", exclude_after=0)
    with pytest.raises(UserError, match=r"uneven_tp\.degrees=\[4, 3\] fixes the layout"):
        after("uneven", request(2, degrees=(4, 3)), 0)
