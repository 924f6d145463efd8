"""Gradient sync by segments: pack, reduce where the segment lives, unpack.

Every segment has one owner per replica; those owners meet directly, so a rank sends exactly
its own shard and nothing is resharded inside a replica (design section 2.3). Replicated
parameters meet over the first rank of each cell and are then broadcast inside it, which
keeps the ranks of a cell bitwise equal whatever order the collective sums in.

:class:`SegmentBucketGroup` has the interface Megatron's ``DistributedDataParallel`` expects
of a bucket group. One staging buffer serves all buckets: a bucket is unpacked before the
next one is packed; on GPUs both run on a side stream, so the backward pass does not wait.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from nemo_uneven_tp.buckets import Bucket, LocatedPiece, Ranks, main_grad
from nemo_uneven_tp.errors import UnevenTPError
from nemo_uneven_tp.parallel_state import UnevenState
from nemo_uneven_tp.segment_views import pack, unpack


class NonFiniteGradientError(UnevenTPError, RuntimeError):
    """A gradient holds NaN or Inf; the message names parameter, segment and nominal rank."""


class Staging:
    """One flat buffer that all buckets of a gradient dtype share, and the stream that uses it.

    ``numel`` is the largest number of elements any of them packs.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.empty(numel, dtype=dtype, device=device)
        self.in_flight: SegmentBucketGroup | None = None
        self.gathering: Any = None  # the bucket whose parameters are being gathered
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.numel() * self.buffer.element_size()

    def as_dtype(self, dtype: torch.dtype) -> torch.Tensor:
        """The buffer read as ``dtype``; a wider dtype than the gradients' makes it grow."""
        wanted = torch.empty((), dtype=dtype).element_size()
        if wanted > self.buffer.element_size():
            self.buffer = torch.empty(
                self.buffer.numel() * wanted // self.buffer.element_size(),
                dtype=self.buffer.dtype,
                device=self.buffer.device,
            )
        return self.buffer.view(dtype)

    def on_side_stream(self) -> AbstractContextManager[object]:
        """Context in which packing, collectives and unpacking are issued."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Make the current stream wait for all that was issued on the side stream."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


class SegmentBucketGroup:
    """Gradient sync of one bucket of sharded parameters.

    Args:
        scale: factor put on this rank's gradients before they are summed: the replica's part
            of the global batch (1 with per-token loss).

    Methods take and ignore what Megatron-Core 0.16 passes in addition (``force_all_reduce``,
    for optimizers that are not sharded).
    """

    def __init__(
        self,
        bucket: Bucket,
        state: UnevenState,
        staging: Staging,
        *,
        scale: float,
        overlap: bool,
        check_for_nan: bool,
    ) -> None:
        self.bucket = bucket
        self.state = state
        self.staging = staging
        self.scale = scale
        self.overlap = overlap
        self.check_for_nan = check_for_nan
        self.params = set(bucket.params)
        self.is_last_microbatch = True
        self.params_with_grad: set[torch.nn.Parameter] = set()
        self._works: list[tuple[Ranks, torch.Tensor, dist.Work | None]] | None = None
        self._started = False

    @classmethod
    def staging_numel(cls, bucket: Bucket) -> int:
        """Elements of staging that ``bucket`` needs."""
        return sum(bucket.numel(ranks) for ranks in bucket.pieces)

    def reset(self) -> None:
        """Get ready for the next step."""
        self.params_with_grad = set()
        self.is_last_microbatch = True
        self._started = False

    def register_grad_ready(self, param: torch.nn.Parameter, *later: Any) -> None:
        """Note that the gradient of ``param`` is complete; start when all of the bucket are."""
        if not self.is_last_microbatch or self.bucket.at_end:
            return
        if param in self.params_with_grad:
            raise RuntimeError("a gradient became ready twice in one step")
        self.params_with_grad.add(param)
        if len(self.params_with_grad) == len(self.params):
            self.start_grad_sync()

    def start_grad_sync(self, **later: Any) -> None:
        """Pack and send; asynchronous when gradient reduction is overlapped."""
        if self._started:
            raise RuntimeError("gradient sync of a bucket was started twice in one step")
        self._started = True
        if self.staging.in_flight is not None:
            self.staging.in_flight.complete()
        with self.staging.on_side_stream():
            flats = self._flats(self.staging.buffer)
            for ranks, pieces in self.bucket.pieces.items():
                flat = flats[ranks]
                pack(grad_views(pieces), flat)
                if self.check_for_nan:
                    check_finite(flat, pieces, self.state.plan.nominal_rank(self.state.rank))
                if self.scale != 1.0:
                    flat.mul_(self.scale)
            # Packed all, so that what comes back may overwrite the bucket's gradients.
            self._works = [(ranks, flat, self._send(ranks, flat)) for ranks, flat in flats.items()]
        self.staging.in_flight = self
        if not self.overlap:
            self.complete()

    def _flats(self, buffer: torch.Tensor) -> dict[Ranks, torch.Tensor]:
        """Where in ``buffer`` each sync group's packed elements go."""
        flats, offset = {}, 0
        for ranks in self.bucket.pieces:
            numel = self.bucket.numel(ranks)
            flats[ranks] = buffer[offset : offset + numel]
            offset += numel
        return flats

    def _send(self, ranks: Ranks, flat: torch.Tensor) -> dist.Work | None:
        return dist.all_reduce(flat, group=self.state.sync_groups[ranks], async_op=True)

    def complete(self) -> None:
        """Wait for what was sent and put the sums back into the gradients."""
        if self._works is None:
            return
        with self.staging.on_side_stream():
            for ranks, flat, work in self._works:
                if work is not None:
                    work.wait()
                self._receive(ranks, flat)
        self._works = None
        if self.staging.in_flight is self:
            self.staging.in_flight = None

    def _receive(self, ranks: Ranks, flat: torch.Tensor) -> None:
        unpack(flat, grad_views(self.bucket.pieces[ranks]))

    def finish_grad_sync(self, **later: Any) -> None:
        """Finish the bucket; with overlap off, do all of it here."""
        if not self._started:
            if self.overlap and not self.bucket.at_end:
                raise RuntimeError(
                    f"{len(self.params_with_grad)} of {len(self.params)} gradients of a bucket are "
                    "there: a parameter took no part in the loss"
                )
            self.start_grad_sync()
        self.complete()
        self.staging.join()

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Nothing: without a sharded optimizer every rank updates all its parameters."""


class ReplicatedBucketGroup(SegmentBucketGroup):
    """Gradient sync of replicated parameters, done when the backward pass is over.

    ``partial`` lists parameters whose gradients each rank of a cell holds only in part
    (sequence parallelism, q and k layer norms): they are summed inside the cell first.
    Megatron sums them last, which fails when a rank has no peer in the other replicas.
    """

    def __init__(self, *args: Any, partial: set[torch.nn.Parameter], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.partial = partial & self.params

    def _send(self, ranks: Ranks, flat: torch.Tensor) -> dist.Work | None:
        cell = self.state.cell
        if self.partial and cell.degree > 1:
            self._sum_partial_in_cell(ranks, flat)
        if self.state.leaders is not None:
            dist.all_reduce(flat, group=self.state.leaders)
        if cell.degree > 1:
            dist.broadcast(flat, cell.ranks[0], group=self.state.tp_group)
        return None

    def _sum_partial_in_cell(self, ranks: Ranks, flat: torch.Tensor) -> None:
        views, offset = [], 0
        for param, piece in self.bucket.pieces[ranks]:
            if param in self.partial:
                views.append(flat[offset : offset + piece.numel])
            offset += piece.numel
        together = torch.cat(views)
        dist.all_reduce(together, group=self.state.tp_group)
        unpack(together, views)


def grad_views(pieces: list[LocatedPiece]) -> list[torch.Tensor]:
    """Views of ``pieces`` in the parameters' ``main_grad``."""
    return [view for param, piece in pieces for view in piece.views(main_grad(param))]


def check_finite(flat: torch.Tensor, pieces: list[LocatedPiece], nominal_rank: int) -> None:
    """Raise if ``flat``, packed from ``pieces``, holds NaN or Inf.

    Raises:
        NonFiniteGradientError: naming the first bad parameter, its segment and the nominal rank.
    """
    if bool(torch.isfinite(flat.sum())) or bool(torch.isfinite(flat).all()):
        return
    for param, piece in pieces:
        for view in piece.views(main_grad(param)):
            if not bool(torch.isfinite(view).all()):
                kind = "NaN" if bool(torch.isnan(view).any()) else "Inf"
                raise NonFiniteGradientError(
                    f"{kind} in the gradient of {piece.describe()} on rank {nominal_rank} "
                    "(as the whole job numbers them), before gradient sync"
                )
