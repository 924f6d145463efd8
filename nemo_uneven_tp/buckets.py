"""Buckets: which parameters meet together, decided from the plan alone.

Members of a sync group sit in cells of different degree, so their own tensor sizes differ.
Buckets are therefore cut by a size every rank computes alike (the largest share any rank
holds), and each bucket's packed layout per sync group is the same on all its members.
Replicated parameters have a bucket of their own: it has the same layout on every rank of the
stage, meets over the leaders, and is finished last. So has a tied embedding whose two copies
lie in different stages: it meets when the backward pass of both is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from nemo_uneven_tp.model_shape import cut_of
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.segment_views import Piece, local_extent, pieces_of
from nemo_uneven_tp.shares import Axis

Ranks = tuple[int, ...]
LocatedPiece = tuple[torch.nn.Parameter, Piece]

DEFAULT_BUCKET_SIZE = 40_000_000
"""Elements; Megatron's own default (``DistributedDataParallel``)."""


@dataclass(slots=True)
class Bucket:
    """Parameters whose gradients are packed and sent together.

    ``pieces[ranks]`` lists what this rank packs for the sync group ``ranks``, in the order
    all members use. ``params`` is in the order of the model, last first. ``grads`` is the
    contiguous memory of their ``main_grad``, set by :func:`place_gradients`.
    """

    params: list[torch.nn.Parameter]
    pieces: dict[Ranks, list[LocatedPiece]] = field(default_factory=dict)
    replicated: bool = False
    tied: bool = False
    grads: torch.Tensor | None = None

    @property
    def at_end(self) -> bool:
        """Whether the bucket meets when the backward pass is over, never during it."""
        return self.replicated or self.tied

    def numel(self, ranks: Ranks) -> int:
        """Elements this rank packs for ``ranks``."""
        return sum(piece.numel for _, piece in self.pieces[ranks])


def make_buckets(
    plan: Plan,
    rank: int,
    named_params: Sequence[tuple[str, torch.nn.Parameter]],
    bucket_size: int | None,
) -> list[Bucket]:
    """Cut parameters into buckets, in the order backward makes their gradients.

    Args:
        named_params: trainable parameters in model order.
        bucket_size: elements, counted at the largest share of any rank.
    """
    limit = bucket_size or DEFAULT_BUCKET_SIZE
    buckets: list[Bucket] = []
    tied: list[Bucket] = []
    leaders = plan.leaders(plan.location(rank)[0].stage)
    replicated: dict[torch.dtype, Bucket] = {}
    current, filled = Bucket([]), 0
    current_dtype: torch.dtype | None = None
    for name, param in reversed(named_params):
        cut = cut_of(name, plan.model)
        if cut is None:
            together = replicated.setdefault(
                param.dtype, Bucket([], {leaders: []}, replicated=True)
            )
            together.params.append(param)
            together.pieces[leaders] += [
                (param, piece) for piece in pieces_of(plan, rank, name, param.shape)
            ]
            continue
        if plan.ties_stages and cut.axis is Axis.VOCAB:
            tied.append(Bucket([param], tied=True))
            _add_pieces(tied[-1], plan, rank, name, param)
            continue
        if current.params and (filled >= limit or param.dtype != current_dtype):
            buckets.append(current)
            current, filled = Bucket([]), 0
        current_dtype = param.dtype
        current.params.append(param)
        _add_pieces(current, plan, rank, name, param)
        filled += _largest_share(plan, rank, name, param)
    if current.params:
        buckets.append(current)
    order = {group.ranks: i for i, group in enumerate(plan.sync_groups)}
    buckets += tied
    for bucket in buckets:
        bucket.pieces = dict(sorted(bucket.pieces.items(), key=lambda item: order[item[0]]))
    return buckets + list(replicated.values())


def _add_pieces(
    bucket: Bucket, plan: Plan, rank: int, name: str, param: torch.nn.Parameter
) -> None:
    for piece in pieces_of(plan, rank, name, param.shape):
        assert piece.segment is not None
        bucket.pieces.setdefault(piece.segment.owners, []).append((param, piece))


def main_grad(param: torch.nn.Parameter) -> torch.Tensor:
    """The parameter's view of the gradient buffer, where Megatron keeps it."""
    grad = getattr(param, "main_grad")  # noqa: B009
    assert isinstance(grad, torch.Tensor)
    return grad


def place_gradients(buckets: Sequence[Bucket], memory: torch.Tensor) -> None:
    """Move ``main_grad`` of all parameters into ``memory`` so that buckets are contiguous.

    Args:
        memory: zeroed, 1-D, as many elements as all parameters of ``buckets`` together.
    """
    offset = 0
    for bucket in buckets:
        start = offset
        for param in bucket.params:
            stop = offset + param.numel()
            # Megatron keeps the gradient buffer's view here.
            setattr(param, "main_grad", memory[offset:stop].view(param.shape))  # noqa: B010
            offset = stop
        bucket.grads = memory[start:offset]


def _largest_share(plan: Plan, rank: int, name: str, param: torch.nn.Parameter) -> int:
    cut = cut_of(name, plan.model)
    assert cut is not None
    others = param.numel() // param.shape[cut.dim]
    return others * max(
        local_extent(plan, rank, cut) for cell in plan.distinct_cells for rank in cell.ranks
    )
