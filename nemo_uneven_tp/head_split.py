"""Attention cut by query group or by query head: which costs the busiest rank less (pure).

A cut by group gives a rank whole groups: their query heads, and one key and one value head
each. A cut by head may end inside a group; every rank with a head of that group then computes
its keys and values too, so the cell does more arithmetic in all, but the busiest rank has at
most one query head more than another. With as many groups as ranks, or a multiple, both are
the same. Plans still cut by group; this only counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_uneven_tp.costs import attention_flops
from nemo_uneven_tp.model_shape import ModelShape
from nemo_uneven_tp.shares import Boundaries, even_boundaries


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCut:
    """Both cuts of one layer's attention over a cell of healthy ranks.

    ``flops_by_group`` and ``flops_by_head``: forward FLOPs per token of each rank.
    """

    flops_by_group: tuple[float, ...]
    flops_by_head: tuple[float, ...]

    @property
    def by_head_pays(self) -> bool:
        """Whether the busiest rank has less to do if heads are cut."""
        return max(self.flops_by_head) < max(self.flops_by_group)


def compare_cuts(model: ModelShape, degree: int) -> AttentionCut:
    """Both cuts over ``degree`` ranks, as even as their units allow.

    Raises ``ValueError`` if ``degree`` is not from 1 to the number of query heads.
    """
    heads = model.num_attention_heads
    if not 1 <= degree <= heads:
        raise ValueError(f"degree {degree} is not from 1 to the {heads} query heads")
    size = model.heads_per_group
    groups = even_boundaries(model.num_query_groups, degree)
    return AttentionCut(
        flops_by_group=_flops(model, tuple(b * size for b in groups)),
        flops_by_head=_flops(model, even_boundaries(heads, degree)),
    )


def groups_of_heads(model: ModelShape, first: int, stop: int) -> range:
    """Query groups whose keys and values the query heads ``[first, stop)`` need."""
    if first >= stop:
        return range(0)
    return range(first // model.heads_per_group, (stop - 1) // model.heads_per_group + 1)


def _flops(model: ModelShape, heads: Boundaries) -> tuple[float, ...]:
    return tuple(
        attention_flops(model, stop - first, len(groups_of_heads(model, first, stop)))
        for first, stop in zip(heads, heads[1:], strict=False)
    )
