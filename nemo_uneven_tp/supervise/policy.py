"""Which nominal ranks the next launch of a supervised job leaves out, by policy.

``uneven`` leaves out the ranks that failed, ``drop_replica`` every rank of their replicas, and
``wait`` none: it goes on with all ranks once they have been repaired. Pure Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.planner import PlanRequest

POLICIES = ("uneven", "drop_replica", "wait")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What ended a launch.

    Attributes:
        ranks: nominal ranks that failed by themselves, not those that only lost a peer.
        of_hardware: they died of a signal or hung. An exception is software's: starting again
            may help, and leaving out the rank that met it would not.
    """

    ranks: tuple[int, ...]
    of_hardware: bool


@dataclass
class FailedRanks:
    """The failures of a job and what follows from them.

    Args:
        policy: one of :data:`POLICIES`.
        exclude_after: a rank is left out once it has failed this often of hardware.
    """

    policy: str
    exclude_after: int = 1
    counts: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise UserError(f"supervise.policy={self.policy} must be one of {', '.join(POLICIES)}")
        if self.exclude_after < 1:
            raise UserError(f"supervise.exclude_after={self.exclude_after} must be at least 1")

    def record(self, failure: Failure) -> None:
        """Count a failure; one of software leaves no rank out."""
        if failure.of_hardware:
            self.counts.update(set(failure.ranks))

    def broken(self) -> tuple[int, ...]:
        """Nominal ranks that are out of service, sorted; under ``wait`` they are repaired."""
        if self.policy == "wait":
            return ()
        return tuple(sorted(r for r, n in self.counts.items() if n >= self.exclude_after))

    def request(self, first: PlanRequest) -> PlanRequest:
        """What the next launch asks of the planner.

        Args:
            first: what the first launch asked for; its ``failed_ranks`` stay left out.

        Raises:
            UserError: if ``first`` gives degrees instead of failed ranks and a rank is broken.
        """
        out = {*first.failed_ranks, *self.broken()}
        if not out:
            return first
        if first.degrees is not None:
            raise UserError(
                f"uneven_tp.degrees={list(first.degrees)} fixes the layout, so rank {min(out)} "
                "can't be left out of it; give uneven_tp.failed_ranks instead"
            )
        if self.policy != "drop_replica":
            return replace(first, failed_ranks=tuple(sorted(out)))
        mates = tuple(replica_mates(out, first))
        return replace(first, failed_ranks=mates, allow_dropped_replicas=True)


def replica_mates(ranks: Iterable[int], request: PlanRequest) -> list[int]:
    """All nominal ranks of the replicas that ``ranks`` belong to, sorted.

    Ranks are numbered as in :mod:`nemo_uneven_tp.topology`: stages slowest.
    """
    degree = request.tensor_model_parallel_size
    replicas = request.world_size // (degree * request.pipeline_model_parallel_size)
    theirs = {rank // degree % replicas for rank in ranks}
    return [rank for rank in range(request.world_size) if rank // degree % replicas in theirs]
