"""Which ranks go on: nominal layout and failed ranks -> living replicas (pure).

Stock Megatron numbers ranks with tensor parallelism fastest (order ``tp-cp-ep-dp-pp``), so
with one pipeline stage replica r holds nominal ranks ``[r*tp, (r+1)*tp)``. Compact ranks
keep that order and leave out the ranks that are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_uneven_tp.errors import UnsupportedError, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Living nominal ranks of each living replica, and who is gone.

    ``failed_ranks`` also lists the ranks that ``uneven_tp.degrees`` leaves out and the
    healthy ranks of dropped replicas, so that living and failed ranks make up the world.
    """

    nominal_world_size: int
    replicas: tuple[tuple[int, ...], ...]
    nominal_replicas: tuple[int, ...]
    failed_ranks: tuple[int, ...]
    dropped_replicas: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Number of living ranks."""
        return sum(len(ranks) for ranks in self.replicas)

    def compact_rank(self, nominal_rank: int) -> int | None:
        """Number among the living, ``None`` for a rank that leaves."""
        living = [rank for ranks in self.replicas for rank in ranks]
        return living.index(nominal_rank) if nominal_rank in living else None


def make_topology(
    *,
    tensor_model_parallel_size: int,
    world_size: int,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    failed_ranks: Sequence[int] = (),
    degrees: Sequence[int] | None = None,
    allow_dropped_replicas: bool = False,
) -> Topology:
    """Work out the living replicas.

    Args:
        world_size: the nominal one, failed ranks included (``devices * num_nodes``).
        failed_ranks: nominal ranks that are gone.
        degrees: instead of ``failed_ranks``, the degree of each nominal replica; its last
            ranks are left out.
        allow_dropped_replicas: whether a replica with no living rank may be dropped.

    Raises:
        UserError: naming the key, its value, what is allowed and what to do.
    """
    tp = _positive("strategy.tensor_model_parallel_size", tensor_model_parallel_size)
    _positive("trainer.devices * trainer.num_nodes", world_size)
    _only_one("strategy.pipeline_model_parallel_size", pipeline_model_parallel_size)
    _only_one("strategy.context_parallel_size", context_parallel_size)
    if world_size % tp:
        raise UserError(
            f"trainer.devices * trainer.num_nodes={world_size} is not a multiple of "
            f"strategy.tensor_model_parallel_size={tp}; count failed ranks in, as the stock job "
            "does"
        )
    if degrees is not None and failed_ranks:
        raise UserError(
            f"uneven_tp.failed_ranks={list(failed_ranks)} and uneven_tp.degrees={list(degrees)} "
            "are both set; keep one of them"
        )
    replicas = world_size // tp
    if degrees is not None:
        gone = _left_out(degrees, tp, replicas)
    else:
        gone = _checked_failures(failed_ranks, world_size)
    living = [
        tuple(rank for rank in range(r * tp, (r + 1) * tp) if rank not in gone)
        for r in range(replicas)
    ]
    dropped = tuple(r for r, ranks in enumerate(living) if not ranks)
    if len(dropped) == replicas:
        raise UserError(
            f"uneven_tp.failed_ranks={sorted(gone)} leaves no rank of the {world_size} alive; "
            "at least one must be"
        )
    if dropped and not allow_dropped_replicas:
        r = dropped[0]
        raise UserError(
            f"uneven_tp.failed_ranks={sorted(gone)} holds all ranks of replica {r} "
            f"(ranks {r * tp} to {(r + 1) * tp - 1}), so the replica would be dropped and the "
            "others take over its micro-batches; set uneven_tp.allow_dropped_replicas=true if you "
            "want that"
        )
    return Topology(
        nominal_world_size=world_size,
        replicas=tuple(ranks for ranks in living if ranks),
        nominal_replicas=tuple(r for r, ranks in enumerate(living) if ranks),
        failed_ranks=tuple(sorted(gone)),
        dropped_replicas=dropped,
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(key: str, value: int) -> int:
    if not _is_integer(value) or value < 1:
        raise UserError(f"{key}={value} must be an integer of at least 1")
    return value


def _only_one(key: str, value: int) -> None:
    if _positive(key, value) != 1:
        raise UnsupportedError(
            f"{key}={value} is not supported with uneven_tp yet; set it to 1 or use uneven_tp=off"
        )


def _left_out(degrees: Sequence[int], tp: int, replicas: int) -> set[int]:
    if len(degrees) != replicas:
        raise UserError(
            f"uneven_tp.degrees={list(degrees)} lists {len(degrees)} degrees for {replicas} "
            "replicas; give one per data-parallel replica"
        )
    for degree in degrees:
        if not _is_integer(degree) or not 1 <= degree <= tp:
            raise UserError(
                f"uneven_tp.degrees={list(degrees)}: {degree!r} is not an integer from 1 to "
                f"strategy.tensor_model_parallel_size={tp}; give each replica a degree in that "
                "range"
            )
    return {
        rank for r, degree in enumerate(degrees) for rank in range(r * tp + degree, (r + 1) * tp)
    }


def _checked_failures(failed_ranks: Sequence[int], world_size: int) -> set[int]:
    shown = list(failed_ranks)
    for rank in failed_ranks:
        if not _is_integer(rank) or not 0 <= rank < world_size:
            raise UserError(
                f"uneven_tp.failed_ranks={shown}: {rank!r} is not a nominal rank; ranks of this "
                f"job are 0 to {world_size - 1}"
            )
    repeated = sorted({rank for rank in failed_ranks if shown.count(rank) > 1})
    if repeated:
        raise UserError(
            f"uneven_tp.failed_ranks={shown} lists rank {repeated[0]} more than once; list each "
            "failed rank once"
        )
    return set(failed_ranks)
