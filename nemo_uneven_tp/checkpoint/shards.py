"""The distributed optimizer's part of a checkpoint, in the model's layout of tensors.

An optimizer shard is a run of the packed elements of one sync group: for each parameter, a
range of the row-major elements of a segment. Such a range is at most a partial row, whole
rows and a partial row, so a rank writes its own state as a few rectangles of the global
tensor and reads just those back. Nothing is sent between ranks, nobody holds more than its
own shard, and each element is written once.

On disk this is what stock Megatron's ``DistributedOptimizer`` calls ``fully_reshardable``:
``optimizer.state.{param,exp_avg,exp_avg_sq}.<key of the parameter>``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from nemo_uneven_tp.checkpoint.segments import Placement, SegmentFactory, runs_of
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.segment_views import Piece

FORMAT = "fully_reshardable"
PREFIX = "optimizer.state"
MAIN = "param"
WRITER = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a row-major tensor that is contiguous in it.

    ``start`` is the first of its elements, counted through the whole tensor.
    """

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


def blocks_of(shape: Sequence[int], start: int, stop: int) -> Iterator[Block]:
    """The fewest rectangles that make up elements ``[start, stop)`` of a tensor of ``shape``."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield Block((start,), (stop - start,), start)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield Block((first, *zeros), (last - first, *shape[1:]), first * row)
    yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Block]:
    base = index * prod(shape[1:])
    for block in blocks_of(shape[1:], start - base, stop - base):
        yield Block((index, *block.offset), (1, *block.sizes), base + block.start)


def sharded_tensors(
    piece: Piece, in_piece: slice, state: torch.Tensor, entry: Any, key: str, plan: Plan
) -> list[ShardedTensor]:
    """Elements ``in_piece`` of a packed piece as rectangles of the global tensor ``key``.

    Args:
        state: these elements, 1-D; the rectangles are views of it.
        entry: the model's entry of the parameter (:mod:`.segments`).
    """
    found = []
    run_start = 0
    for run, view, offset in _runs(piece, entry, plan):
        first = max(in_piece.start, run_start)
        last = min(in_piece.stop, run_start + view.numel())
        for block in blocks_of(view.shape, first - run_start, last - run_start):
            begin = run_start + block.start - in_piece.start
            data = state[begin : begin + prod(block.sizes)].view(block.sizes)
            place = [o + b for o, b in zip(offset, block.offset, strict=True)]
            found.append(_tensor(entry, key, run, data, place, piece.shape))
        run_start += view.numel()
    return found


def _runs(piece: Piece, entry: Any, plan: Plan) -> Iterator[tuple[int, torch.Tensor, list[int]]]:
    if piece.segment is None:
        yield 0, entry.data, [0] * entry.data.dim()
    else:
        yield from runs_of(piece, entry.data, plan)


def _tensor(
    entry: Any, key: str, run: int, data: torch.Tensor, place: list[int], shape: tuple[int, ...]
) -> ShardedTensor:
    if isinstance(entry, SegmentFactory):
        assert entry.placement is not None
        return entry.placement.tensor(key, run, data, place, shape, WRITER)
    lead = entry.prepend_axis_num
    whole = Placement(
        tuple(entry.global_shape[:lead]),
        tuple(entry.global_offset[:lead]),
        ("",),
        runs=1,
        dim=0,
        extent=shape[0],
        allow_shape_mismatch=entry.allow_shape_mismatch,
    )
    return whole.tensor(key, 0, data, place, shape, WRITER)


def fill(state: torch.Tensor, loaded: list[torch.Tensor]) -> None:
    """Copy what was loaded for :func:`sharded_tensors` into ``state``.

    The rectangles follow each other in it without gaps.
    """
    offset = 0
    for block in loaded:
        target = state[offset : offset + block.numel()]
        if target.data_ptr() != block.data_ptr():
            target.copy_(block.flatten())
        offset += block.numel()
