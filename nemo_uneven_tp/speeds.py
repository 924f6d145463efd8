"""Relative speeds of ranks: from what the user writes to one number per nominal rank (pure).

A speed of 1 is a healthy rank's; 0.7 means that the rank computes 0.7 times as much in the
same time. Only ratios matter. Shares of every axis but the vocabulary follow the speeds of a
cell's ranks; the vocabulary stays even, because Megatron's embedding and cross entropy work
out a rank's first row from equal parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_uneven_tp.errors import UserError

KEY = "uneven_tp.rank_speeds"
AUTO = "auto"

SpeedTable = Mapping[int, float] | Sequence[float] | None


def speed_table(value: Any, world_size: int) -> dict[int, float]:
    """``{nominal rank: speed}`` of all ranks but those of speed 1.

    Args:
        value: a mapping from nominal ranks to speeds, a list with one speed per nominal rank,
            or ``None``.
        world_size: the nominal one.

    Raises:
        UserError: naming the key, the value, what is allowed and what to do.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        given = dict(value)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != world_size:
            raise UserError(
                f"{KEY}={list(value)} lists {len(value)} speeds for {world_size} ranks; give one "
                "per rank of the whole job, or a table such as {3: 0.7}"
            )
        given = dict(enumerate(value))
    else:
        raise UserError(
            f"{KEY}={value!r} must be a table such as {{3: 0.7}}, a list with one speed per rank, "
            "auto or null"
        )
    table = {}
    for rank, speed in given.items():
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world_size:
            raise UserError(
                f"{KEY}: {rank!r} is not a rank of the whole job; they are 0 to {world_size - 1}"
            )
        number = isinstance(speed, (int, float)) and not isinstance(speed, bool)
        if not number or not 0 < speed < float("inf"):
            raise UserError(
                f"{KEY}: the speed {speed!r} of rank {rank} must be a number greater than 0 "
                "(1 is a healthy rank's); a rank that can't compute belongs into "
                "uneven_tp.failed_ranks"
            )
        if speed != 1:
            table[rank] = float(speed)
    return table


def cell_speeds(table: Mapping[int, float], nominal_ranks: Sequence[int]) -> tuple[float, ...]:
    """The speeds of a cell's ranks; empty if all are as fast as each other."""
    speeds = tuple(table.get(rank, 1.0) for rank in nominal_ranks)
    return speeds if len({*speeds, 1.0}) > 1 else ()
