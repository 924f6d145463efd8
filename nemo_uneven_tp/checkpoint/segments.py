"""The model's part of a checkpoint, segment by segment.

Stock Megatron describes a tensor-parallel shard by its place in a regular grid. Here every
segment of a parameter becomes one ``ShardedTensor`` with its own offset in the same global
tensor, under the same key: on disk it is what a stock run writes, so any plan and stock
Megatron read each other's checkpoints. Optimizers whose state has the shape of the
parameters follow, since Megatron builds theirs from the model's factories.

A segment has one owner in every replica. Which of them is the writer goes round, so each
element is written once and no replica writes all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from nemo_uneven_tp.model_shape import cut_of
from nemo_uneven_tp.parallel_state import UnevenState, get_state
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.segment_views import Piece, pieces_of
from nemo_uneven_tp.shares import Axis

Entry = Any
"""A ``ShardedTensor`` or ``ShardedTensorFactory``: how a checkpoint stores one parameter."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the shares of one cut parameter lie in global tensors.

    Homogeneous layers are stacked along axes in front of the parameter's own: ``lead_shape``
    are their sizes and ``lead_offset`` this layer's place. ``suffixes`` holds what the key of
    the global tensor ends with: one for all runs (a gated ``linear_fc1`` is ``[gate; up]``),
    or one per run. ``start`` is the first unit of this rank's share in indices along ``dim``
    of one run, ``extent`` how many the run has in the whole model.
    """

    lead_shape: tuple[int, ...]
    lead_offset: tuple[int, ...]
    suffixes: tuple[str, ...]
    runs: int
    dim: int
    extent: int
    allow_shape_mismatch: bool

    def tensor(
        self,
        key: str,
        run: int,
        data: torch.Tensor,
        offset: Sequence[int],
        other_sizes: Sequence[int],
        replica_id: tuple[int, ...],
    ) -> ShardedTensor:
        """A block of run ``run``.

        Args:
            data: the block, in the parameter's own dimensions.
            offset: of the block in the run.
            other_sizes: global sizes of the parameter; the one along ``dim`` is not used.
        """
        together = len(self.suffixes) == 1
        shape, start = list(other_sizes), list(offset)
        shape[self.dim] = self.extent * (self.runs if together else 1)
        start[self.dim] += self.extent * run if together else 0
        lead = len(self.lead_shape)
        return ShardedTensor(
            key + self.suffixes[0 if together else run],
            data[(None,) * lead],
            data.dtype,
            (1,) * lead + tuple(data.shape),
            (*self.lead_shape, *shape),
            (*self.lead_offset, *start),
            None,
            replica_id,
            allow_shape_mismatch=self.allow_shape_mismatch,
        )


@dataclass
class SegmentFactory(ShardedTensorFactory):
    """Stands for one parameter; becomes its segments when a checkpoint is written or read."""

    placement: Placement | None = field(default=None, kw_only=True)


def save_by_segments(model: Any) -> None:
    """Have ``model.sharded_state_dict`` describe shares that stock Megatron's grid can't.

    Where the grid can, the stock description stays.
    """
    state = get_state()
    if is_regular(state.plan):
        return
    stock: Callable[..., dict[str, Any]] = model.sharded_state_dict

    def sharded_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return by_segments(stock(*args, **kwargs), state)

    model.sharded_state_dict = sharded_state_dict


def is_regular(plan: Plan) -> bool:
    """Whether every share is what stock Megatron gives each rank at one degree for all."""
    if not plan.is_uniform:
        return False
    return all(
        len({segment.stop - segment.start for segment in plan.segments(axis)}) == 1
        and len(plan.segments(axis)) == plan.cells[0].degree
        for axis in Axis
    )


def by_segments(stock: dict[str, Any], state: UnevenState) -> dict[str, Any]:
    """A model's stock sharded state dict with cut parameters replaced by segment factories.

    Raises:
        ValueError: if a parameter does not have the share that the plan gives this rank.
    """
    result = {}
    for index, (name, entry) in enumerate(stock.items()):
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory)):
            entry = _by_segments(name, entry, index, state)
        result[name] = entry
    return result


def _by_segments(name: str, entry: Entry, index: int, state: UnevenState) -> Entry:
    plan = state.plan
    if cut_of(name, plan.model) is None:
        stage, tp_rank, _ = entry.replica_id
        return replace(entry, replica_id=(stage, tp_rank, turn(state, index)))
    pieces = pieces_of(plan, state.rank, name, entry.data.shape)
    placement = placement_of(name, entry, plan)
    shape = tuple(entry.data.shape)
    turns = [turn(state, index + number_of(piece, plan)) for piece in pieces]

    def build(key: str, tensor: torch.Tensor, replica_id: Any, flattened: Any) -> list[Any]:
        if flattened is not None:
            raise ValueError(f"{key}: flattened checkpoint tensors have no segments")
        if not pieces:  # a share of nothing, such as vocabulary that does not reach this rank
            return [LocalNonpersistentObject(tensor)]
        return [
            placement.tensor(key, run, view, start, shape, (replica_id[0], 0, whose_turn))
            for piece, whose_turn in zip(pieces, turns, strict=True)
            for run, view, start in runs_of(piece, tensor, plan)
        ]

    def merge(loaded: list[torch.Tensor]) -> torch.Tensor:
        if not pieces:
            return loaded[0]
        local = torch.zeros(shape, dtype=loaded[0].dtype, device=loaded[0].device)
        blocks = iter(loaded)
        for piece in pieces:
            for view in piece.views(local):
                view.copy_(next(blocks).view(view.shape))
        return local

    return SegmentFactory(
        entry.key, entry.data, build, merge, entry.replica_id, placement=placement
    )


def placement_of(name: str, entry: Entry, plan: Plan) -> Placement:
    """Where the shares of the cut parameter ``name``, described by stock ``entry``, lie."""
    cut = cut_of(name, plan.model)
    assert cut is not None
    described = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
    first = described[0]
    lead = first.prepend_axis_num
    suffixes = tuple(dict.fromkeys(tensor.key.removeprefix(entry.key) for tensor in described))
    return Placement(
        lead_shape=tuple(first.global_shape[:lead]),
        lead_offset=tuple(first.global_offset[:lead]),
        suffixes=suffixes,
        runs=cut.runs,
        dim=cut.dim,
        extent=plan.units(cut.axis) * cut.per_unit,
        allow_shape_mismatch=cut.axis is Axis.VOCAB,
    )


def runs_of(
    piece: Piece, tensor: torch.Tensor, plan: Plan
) -> Iterator[tuple[int, torch.Tensor, list[int]]]:
    """``(run, view, offset of the view in the global run)`` of a cut piece in ``tensor``."""
    cut = cut_of(piece.name, plan.model)
    assert cut is not None
    assert piece.segment is not None
    for run, view in enumerate(piece.views(tensor)):
        offset = [0] * view.dim()
        offset[cut.dim] = piece.segment.start * cut.per_unit
        yield run, view, offset


def number_of(piece: Piece, plan: Plan) -> int:
    """The number of the piece's segment along its axis."""
    assert piece.segment is not None
    stage = plan.location(piece.segment.owners[0])[0].stage
    return plan.segments(piece.segment.axis, stage).index(piece.segment)


def turn(state: UnevenState, index: int) -> int:
    """0 for the one replica that writes the ``index``-th thing, other numbers elsewhere."""
    return (state.cell.replica - index) % state.plan.replicas
