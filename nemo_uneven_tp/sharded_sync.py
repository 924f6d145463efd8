"""Sync for the distributed optimizer: reduce-scatter gradients, all-gather parameters.

What a sync group packs from a bucket is one flat buffer, padded to a multiple of the group's
size; every member owns one equal part of it, its **optimizer shard**. So a rank keeps
optimizer state for its share divided by the number of replicas, whatever the degrees
(ZeRO-1, arXiv 1910.02054 section 5.1, over each sync group).

The reduced gradient shard overwrites gradients of the bucket that were packed before, so it
costs no memory; parameters come back through the same staging buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from nemo_uneven_tp.buckets import Bucket, LocatedPiece, Ranks
from nemo_uneven_tp.grad_sync import ReplicatedBucketGroup, SegmentBucketGroup
from nemo_uneven_tp.segment_views import Piece, pack, unpack


@dataclass(slots=True)
class OptimizerShard:
    """This rank's part of what one sync group packs from one bucket.

    ``start`` and ``stop`` delimit it in the packed order, padding left out; ``length`` is its
    size with padding. ``grad`` is where its reduced gradients arrive, ``main`` the fp32
    parameters, set by the optimizer.
    """

    ranks: Ranks
    pieces: list[LocatedPiece]
    start: int
    stop: int
    length: int
    grad: torch.Tensor
    main: torch.Tensor | None = None

    def parts(self) -> Iterator[tuple[torch.nn.Parameter, Piece, slice, slice]]:
        """``(param, piece, where in the shard, where in the packed piece)`` for each overlap."""
        offset = 0
        for param, piece in self.pieces:
            first, last = max(offset, self.start), min(offset + piece.numel, self.stop)
            if first < last:
                yield (
                    param,
                    piece,
                    slice(first - self.start, last - self.start),
                    slice(first - offset, last - offset),
                )
            offset += piece.numel


def padded_numel(bucket: Bucket, ranks: Ranks) -> int:
    """Packed elements of ``ranks``, padded to a multiple of the group's size."""
    return -(-bucket.numel(ranks) // len(ranks)) * len(ranks)


class ShardedBucketGroup(SegmentBucketGroup):
    """A bucket whose gradients are reduce-scattered and whose parameters are all-gathered.

    ``shards`` holds this rank's part per sync group.
    """

    def __init__(self, *args: Any, overlap_param_gather: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A tied embedding is needed by two stages that wait for each other's activations.
        self.overlap_param_gather = overlap_param_gather and not self.bucket.tied
        self.next_param_gather_bucket_group: ShardedBucketGroup | None = None
        self.shards = self._make_shards()
        self._stale = False
        self._gathers: list[tuple[Ranks, torch.Tensor, dist.Work | None]] | None = None

    @classmethod
    def staging_numel(cls, bucket: Bucket) -> int:
        """Elements of staging that ``bucket`` needs, padding included."""
        return sum(padded_numel(bucket, ranks) for ranks in bucket.pieces)

    def _make_shards(self) -> dict[Ranks, OptimizerShard]:
        assert self.bucket.grads is not None
        shards, offset = {}, 0
        for ranks, pieces in self.bucket.pieces.items():
            if self.state.rank not in ranks:
                continue
            length = padded_numel(self.bucket, ranks) // len(ranks)
            numel = self.bucket.numel(ranks)
            start = ranks.index(self.state.rank) * length
            shards[ranks] = OptimizerShard(
                ranks,
                pieces,
                min(start, numel),
                min(start + length, numel),
                length,
                self.bucket.grads[offset : offset + length],
            )
            offset += length
        return shards

    def _flats(self, buffer: torch.Tensor) -> dict[Ranks, torch.Tensor]:
        flats, offset = {}, 0
        for ranks in self.bucket.pieces:
            padded = padded_numel(self.bucket, ranks)
            flats[ranks] = buffer[offset : offset + padded]
            flats[ranks][self.bucket.numel(ranks) :].zero_()
            offset += padded
        return flats

    def _send(self, ranks: Ranks, flat: torch.Tensor) -> dist.Work | None:
        return dist.reduce_scatter_tensor(
            self.shards[ranks].grad, flat, group=self.state.sync_groups[ranks], async_op=True
        )

    def _receive(self, ranks: Ranks, flat: torch.Tensor) -> None:
        """Nothing: the shard is where the optimizer reads it."""

    # --- parameters -----------------------------------------------------------------------

    def params_changed(self) -> None:
        """Note that the optimizer has updated the shards; parameters must be gathered."""
        self._stale = True

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gather changed parameters; asynchronous when overlapped, unless ``force_sync``."""
        if self._stale and self._gathers is None:
            self._start_gather()
        if force_sync or not self.overlap_param_gather:
            self._finish_gather()

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Have this bucket's parameters in place; start gathering the next bucket's."""
        if not self._stale:
            return
        self.start_param_sync()
        self._finish_gather()
        following = self.next_param_gather_bucket_group
        if following is not None and not skip_next_bucket_dispatch:
            following.start_param_sync()

    def _start_gather(self) -> None:
        previous = self.staging.gathering
        if previous is not None:
            previous._finish_gather()
        dtype = self.bucket.params[0].dtype
        with self.staging.on_side_stream():
            flats = self._flats(self.staging.as_dtype(dtype))
            self._gathers = [
                (ranks, flat, self._gather(ranks, flat)) for ranks, flat in flats.items()
            ]
        self.staging.gathering = self

    def _gather(self, ranks: Ranks, flat: torch.Tensor) -> dist.Work | None:
        own = self._own_part(ranks, flat)
        return dist.all_gather_into_tensor(
            flat, own, group=self.state.sync_groups[ranks], async_op=True
        )

    def _own_part(self, ranks: Ranks, flat: torch.Tensor) -> torch.Tensor:
        shard = self.shards[ranks]
        assert shard.main is not None
        index = ranks.index(self.state.rank)
        own = flat[index * shard.length : (index + 1) * shard.length]
        own[: shard.main.numel()].copy_(shard.main)
        return own

    def _finish_gather(self) -> None:
        if self._gathers is None:
            return
        with self.staging.on_side_stream():
            for ranks, flat, work in self._gathers:
                if work is not None:
                    work.wait()
                unpack(flat, param_views(self.bucket.pieces[ranks]))
        self.staging.join()
        self._gathers = None
        self._stale = False
        if self.staging.gathering is self:
            self.staging.gathering = None

    def load_main_params(self) -> None:
        """Set the fp32 main parameters of the shards from the model's parameters."""
        for shard in self.shards.values():
            assert shard.main is not None
            for param, piece, in_shard, in_piece in shard.parts():
                packed = torch.empty(piece.numel, dtype=param.dtype, device=param.device)
                pack(piece.views(param.data), packed)
                shard.main[in_shard].copy_(packed[in_piece])


class ShardedReplicatedBucketGroup(ReplicatedBucketGroup, ShardedBucketGroup):
    """Replicated parameters: the leaders shard them, then broadcast inside their cells."""

    def _send(self, ranks: Ranks, flat: torch.Tensor) -> dist.Work | None:
        if self.partial and self.state.cell.degree > 1:
            self._sum_partial_in_cell(ranks, flat)
        if self.state.leaders is not None:
            return ShardedBucketGroup._send(self, ranks, flat)
        return None

    def _receive(self, ranks: Ranks, flat: torch.Tensor) -> None:
        """Nothing: only the leaders' optimizers need these gradients."""

    def _gather(self, ranks: Ranks, flat: torch.Tensor) -> dist.Work | None:
        cell = self.state.cell
        if self.state.leaders is not None:
            own = self._own_part(ranks, flat)
            dist.all_gather_into_tensor(flat, own, group=self.state.leaders)
        if cell.degree > 1:
            dist.broadcast(flat, cell.ranks[0], group=self.state.tp_group)
        return None


def param_views(pieces: list[LocatedPiece]) -> list[torch.Tensor]:
    """Views of ``pieces`` in the parameters themselves."""
    return [view for param, piece in pieces for view in piece.views(param.data)]


def chain_in_forward_order(groups: list[SegmentBucketGroup]) -> None:
    """Let each bucket start gathering the one that the forward pass needs next.

    Sharded buckets are in backward order; the replicated ones are needed first.
    """
    sharded = [g for g in groups if isinstance(g, ShardedBucketGroup) and g.overlap_param_gather]
    order = [g for g in sharded if g.bucket.replicated]
    order += [g for g in reversed(sharded) if not g.bucket.replicated]
    for group, following in zip(order, order[1:], strict=False):
        group.next_param_gather_bucket_group = following
