"""Shares and segments: how one sharded axis is cut (pure integers).

* A **unit** is the smallest piece of an axis that stays whole: a query group, an
  FFN column, a vocabulary row.
* A **share** is the run of units one tensor-parallel rank of a cell owns. The
  shares of a cell of degree ``t`` are written as ``t + 1`` boundaries
  ``b[0] = 0 <= b[1] <= ... <= b[t] = units``; rank ``i`` owns ``[b[i], b[i+1])``.
* A **segment** is a maximal run of units that has exactly one owner in every replica.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate

Boundaries = tuple[int, ...]


class Axis(StrEnum):
    """The three axes tensor parallelism cuts in a dense GPT.

    ``QUERY_GROUP``: query groups of attention (a group is its query heads plus one
    key and one value head). ``FFN``: columns of the MLP's inner width.
    ``VOCAB``: rows of the (padded) vocabulary.
    """

    QUERY_GROUP = "query_group"
    FFN = "ffn"
    VOCAB = "vocab"


def even_boundaries(units: int, degree: int) -> Boundaries:
    """Boundaries of ``degree`` shares that differ by at most one unit, the larger ones first."""
    small, larger = divmod(units, degree)
    return tuple(i * small + min(i, larger) for i in range(degree + 1))


def weighted_boundaries(units: int, weights: Sequence[float], minimum: int = 0) -> Boundaries:
    """Boundaries of shares in proportion to ``weights``, by largest remainder.

    A share of weight 0 is empty; every other one gets at least ``minimum`` units.
    """
    taking = [i for i, weight in enumerate(weights) if weight > 0]
    parts = largest_remainder(units, [weights[i] for i in taking], minimum)
    sizes = dict(zip(taking, parts, strict=True))
    return tuple(accumulate((sizes.get(i, 0) for i in range(len(weights))), initial=0))


def block_boundaries(units: int, degree: int) -> Boundaries:
    """Boundaries of ``degree`` blocks of ``ceil(units / degree)`` units, the last ones cut short.

    Megatron's vocabulary-parallel embedding and cross entropy compute a rank's first
    row as ``rank * rows_per_rank``, so every rank of a cell must hold equally many
    rows; the rows past ``units`` are dummies of that cell.
    """
    block = -(-units // degree)
    return tuple(min(i * block, units) for i in range(degree + 1))


def owner_index(boundaries: Boundaries, unit: int) -> int:
    """Index of the rank whose share holds ``unit``."""
    return bisect_right(boundaries, unit) - 1


def cut_points(all_boundaries: Sequence[Boundaries]) -> list[tuple[int, int]]:
    """``(start, stop)`` of every segment, given the boundaries of each replica."""
    cuts = sorted({point for boundaries in all_boundaries for point in boundaries})
    return list(zip(cuts, cuts[1:], strict=False))


def largest_remainder(total: int, weights: Sequence[float], minimum: int = 0) -> list[int]:
    """Split ``total`` whole things in proportion to ``weights``, at least ``minimum`` each.

    Hamilton's method: everyone gets the floor of the exact quota, the rest goes to the
    largest remainders (ties to the first). Raises ``ValueError`` if ``total`` cannot give
    everyone the minimum.
    """
    if total < minimum * len(weights):
        raise ValueError(f"{total} cannot give {len(weights)} parts at least {minimum} each")
    whole = sum(weights)
    quotas = [total * weight / whole for weight in weights]
    parts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(weights)), key=lambda i: (parts[i] - quotas[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    while (poorest := min(parts)) < minimum:
        parts[parts.index(max(parts))] -= 1
        parts[parts.index(poorest)] += 1
    return parts
