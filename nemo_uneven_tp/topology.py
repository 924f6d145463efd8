"""Which ranks go on: nominal layout and failed ranks -> living cells (pure).

Stock Megatron numbers ranks with tensor parallelism fastest and pipeline stages slowest
(order ``tp-cp-ep-dp-pp``): stage p of replica r holds nominal ranks ``[c*tp, (c+1)*tp)``
with ``c = p*replicas + r``. Compact ranks keep that order and leave out the ranks that are
gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nemo_uneven_tp.errors import UnsupportedError, UserError

Degrees = Sequence[int | Sequence[int]]
"""A degree per replica, or a row of degrees (one per stage) per replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Living nominal ranks of each cell of the living replicas, and who is gone.

    ``cells[r][p]`` are those of stage p of living replica r. ``failed_ranks`` also lists the
    ranks that ``uneven_tp.degrees`` leaves out and the healthy ranks of dropped replicas, so
    that living and failed ranks make up the world.
    """

    nominal_world_size: int
    cells: tuple[tuple[tuple[int, ...], ...], ...]
    nominal_replicas: tuple[int, ...]
    failed_ranks: tuple[int, ...]
    dropped_replicas: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Number of living ranks."""
        return sum(len(ranks) for stages in self.cells for ranks in stages)

    def compact_rank(self, nominal_rank: int) -> int | None:
        """Number among the living, ``None`` for a rank that leaves."""
        living = sorted(rank for stages in self.cells for ranks in stages for rank in ranks)
        return living.index(nominal_rank) if nominal_rank in living else None


def make_topology(
    *,
    tensor_model_parallel_size: int,
    world_size: int,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    failed_ranks: Sequence[int] = (),
    degrees: Degrees | None = None,
    allow_dropped_replicas: bool = False,
) -> Topology:
    """Work out the living replicas.

    Args:
        world_size: the nominal one, failed ranks included (``devices * num_nodes``).
        failed_ranks: nominal ranks that are gone.
        degrees: instead of ``failed_ranks``, the degree of each nominal replica, or a table
            of one row per replica and one degree per stage; the last ranks of a cell are left
            out.
        allow_dropped_replicas: whether a replica with no living rank may be dropped.

    Raises:
        UserError: naming the key, its value, what is allowed and what to do.
    """
    tp = _positive("strategy.tensor_model_parallel_size", tensor_model_parallel_size)
    _positive("trainer.devices * trainer.num_nodes", world_size)
    stages = _positive("strategy.pipeline_model_parallel_size", pipeline_model_parallel_size)
    _only_one("strategy.context_parallel_size", context_parallel_size)
    if world_size % (tp * stages):
        sizes = f"strategy.tensor_model_parallel_size={tp}"
        if stages > 1:
            sizes += f" x strategy.pipeline_model_parallel_size={stages}"
        raise UserError(
            f"trainer.devices * trainer.num_nodes={world_size} is not a multiple of {sizes}; count "
            "failed ranks in, as the stock job does"
        )
    if degrees is not None and failed_ranks:
        raise UserError(
            f"uneven_tp.failed_ranks={list(failed_ranks)} and uneven_tp.degrees={list(degrees)} "
            "are both set; keep one of them"
        )
    replicas = world_size // (tp * stages)
    if degrees is not None:
        gone = _left_out(degree_table(degrees, tp, replicas, stages), tp)
    else:
        gone = _checked_failures(failed_ranks, world_size)
    living = [
        tuple(
            tuple(rank for rank in _nominal_cell(r, p, replicas, tp) if rank not in gone)
            for p in range(stages)
        )
        for r in range(replicas)
    ]
    dropped = tuple(r for r, cells in enumerate(living) if not all(cells))
    if len(dropped) == replicas:
        what = "no rank" if stages == 1 else "no replica with a rank in every stage"
        raise UserError(
            f"uneven_tp.failed_ranks={sorted(gone)} leaves {what} of the {world_size} ranks alive; "
            "at least one must be"
        )
    if dropped and not allow_dropped_replicas:
        r = dropped[0]
        p = next(p for p, ranks in enumerate(living[r]) if not ranks)
        lost = _nominal_cell(r, p, replicas, tp)
        raise UserError(
            f"uneven_tp.failed_ranks={sorted(gone)} holds all ranks of "
            f"{f'stage {p} of ' if stages > 1 else ''}replica {r} (ranks {lost.start} to "
            f"{lost.stop - 1}), so the replica would be dropped and the others take over its "
            "micro-batches; set uneven_tp.allow_dropped_replicas=true if you want that"
        )
    gone |= {rank for r in dropped for ranks in living[r] for rank in ranks}
    kept = [r for r in range(replicas) if r not in dropped]
    return Topology(
        nominal_world_size=world_size,
        cells=tuple(living[r] for r in kept),
        nominal_replicas=tuple(kept),
        failed_ranks=tuple(sorted(gone)),
        dropped_replicas=dropped,
    )


def degree_table(degrees: Degrees, tp: int, replicas: int, stages: int) -> list[list[int]]:
    """``uneven_tp.degrees`` as one row per replica with one degree per stage.

    Raises:
        UserError: if it has another form, or a degree is not an integer from 1 to ``tp``.
    """
    shown: list[Any] = [
        list(row) if isinstance(row, Sequence) and not isinstance(row, str) else row
        for row in degrees
    ]
    if len(shown) != replicas:
        raise UserError(
            f"uneven_tp.degrees={shown} lists {len(shown)} degrees for {replicas} replicas; give "
            "one per data-parallel replica"
        )
    table = []
    for row in shown:
        cells = row if isinstance(row, list) else [row] * stages
        if len(cells) != stages:
            raise UserError(
                f"uneven_tp.degrees={shown}: {row} lists {len(cells)} degrees for {stages} "
                "pipeline stages; give one per stage, or one number for all of them"
            )
        for degree in cells:
            if not _is_integer(degree) or not 1 <= degree <= tp:
                raise UserError(
                    f"uneven_tp.degrees={shown}: {degree!r} is not an integer from 1 to "
                    f"strategy.tensor_model_parallel_size={tp}; give each replica a degree in that "
                    "range"
                )
        table.append(cells)
    return table


def _nominal_cell(replica: int, stage: int, replicas: int, tp: int) -> range:
    first = (stage * replicas + replica) * tp
    return range(first, first + tp)


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


def _left_out(table: Sequence[Sequence[int]], tp: int) -> set[int]:
    return {
        rank
        for r, row in enumerate(table)
        for p, degree in enumerate(row)
        for rank in _nominal_cell(r, p, len(table), tp)[degree:]
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
