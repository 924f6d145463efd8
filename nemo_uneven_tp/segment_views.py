"""Segments as views: where the units of a segment lie in a rank's own tensors.

A rank stores its share of a parameter exactly as a uniform Megatron layout of that width
would. A segment of it is one or two (gated ``linear_fc1``) blocks of rows, or a block of
columns for row-parallel weights. :class:`Piece` names such a part of one parameter; its
``views`` are strided views, so packing and unpacking are copies between views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nemo_uneven_tp.model_shape import Cut, cut_of
from nemo_uneven_tp.plan import Plan, Segment
from nemo_uneven_tp.shares import Axis


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one local parameter that belongs to ``segment`` (``None``: replicated).

    ``dim``, ``starts`` and ``length`` locate it: one block ``[start, start + length)`` along
    ``dim`` per run.
    """

    name: str
    segment: Segment | None
    shape: tuple[int, ...]
    dim: int = 0
    starts: tuple[int, ...] = ()
    length: int = 0

    def views(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Views of the piece in ``tensor``, which has the parameter's local shape."""
        if self.segment is None:
            return [tensor]
        return [tensor.narrow(self.dim, start, self.length) for start in self.starts]

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        size = torch.Size(self.shape).numel()
        if self.segment is None:
            return size
        return size // self.shape[self.dim] * self.length * len(self.starts)

    def describe(self) -> str:
        """The piece in words, for messages."""
        if self.segment is None:
            return f"{self.name} (replicated)"
        first, last = self.segment.start, self.segment.stop - 1
        return f"{self.name}, {self.segment.axis} units {first} to {last}"


def local_extent(plan: Plan, rank: int, cut: Cut) -> int:
    """Size along ``cut.dim`` of the local parameter of compact rank ``rank``.

    Vocabulary shares are padded with dummy rows to the cell's block size.
    """
    cell, tp_rank = plan.location(rank)
    if cut.axis is Axis.VOCAB:
        units = cell.shares[Axis.VOCAB][1]
    else:
        units = len(cell.share(cut.axis, tp_rank))
    return cut.runs * cut.per_unit * units


def pieces_of(plan: Plan, rank: int, name: str, shape: Sequence[int]) -> list[Piece]:
    """Cut the local parameter ``name`` of local ``shape`` into its segments.

    Raises:
        ValueError: if the local shape is not what the plan gives this rank; a plan and a model
            that disagree must never train.
    """
    cut = cut_of(name, plan.model)
    shape = tuple(shape)
    if cut is None:
        return [Piece(name, None, shape)]
    extent = local_extent(plan, rank, cut)
    if shape[cut.dim] != extent:
        raise ValueError(
            f"parameter {name} of rank {rank} has {shape[cut.dim]} entries along dimension "
            f"{cut.dim}; the plan gives it {extent}"
        )
    cell, tp_rank = plan.location(rank)
    first = cell.shares[cut.axis][tp_rank]
    run_length = extent // cut.runs
    found = []
    for segment in plan.segments(cut.axis, cell.stage):
        if plan.owner(segment, cell) != rank:
            continue
        offset = (segment.start - first) * cut.per_unit
        found.append(
            Piece(
                name,
                segment,
                shape,
                cut.dim,
                tuple(run * run_length + offset for run in range(cut.runs)),
                (segment.stop - segment.start) * cut.per_unit,
            )
        )
    return found


def pack(views: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy ``views`` one after the other into the 1-D tensor ``flat``."""
    offset = 0
    for view in views:
        flat[offset : offset + view.numel()].view(view.shape).copy_(view)
        offset += view.numel()


def unpack(flat: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    """Copy ``flat`` back into ``views``; the inverse of :func:`pack`."""
    offset = 0
    for view in views:
        view.copy_(flat[offset : offset + view.numel()].view(view.shape))
        offset += view.numel()
