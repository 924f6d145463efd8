"""The peer to beat: reshard to the smallest degree, all-reduce, reshard back.

Gradient sync as in "Nonuniform-Tensor-Parallelism" (arXiv 2504.06095, section 3): a replica
of higher degree first moves its gradients, by an all-to-all inside the cell, into side
buffers that are laid out as in the replicas of the smallest degree. Those meet rank by rank.
A second all-to-all brings the sums back. Used by the bench only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from nemo_uneven_tp.buckets import main_grad
from nemo_uneven_tp.model_shape import Cut, cut_of
from nemo_uneven_tp.parallel_state import UnevenState
from nemo_uneven_tp.segment_views import local_extent, pack, unpack

Named = Sequence[tuple[str, torch.nn.Parameter]]


class ReshardFirst:
    """Reshard-first gradient sync of the parameters' ``main_grad``.

    Args:
        named: parameters of this rank, in the same order on all ranks.
        scale: factor on this rank's gradients before they are summed.
    """

    def __init__(self, named: Named, state: UnevenState, scale: float) -> None:
        self.state = state
        self.scale = scale
        self.smallest = min(state.plan.degrees)
        self.meets = state.tp_rank < self.smallest
        self.moves = state.cell.degree > self.smallest
        self.sharded = [(n, p) for n, p in named if cut_of(n, state.plan.model) is not None]
        self.replicated = [p for n, p in named if cut_of(n, state.plan.model) is None]
        aside = next(cell for cell in state.plan.cells if cell.degree == self.smallest)
        self._aside = aside
        shapes = [self._target_shape(n, p) for n, p in self.sharded] if self.meets else []
        sizes = [torch.Size(shape).numel() for shape in shapes]
        total = sum(sizes) + sum(p.numel() for p in self.replicated)
        dtype = main_grad(named[0][1]).dtype
        self.buffer = torch.zeros(total if self.meets else 0, dtype=dtype)
        parts = self.buffer[: sum(sizes)].split(sizes) if self.meets else []
        self.targets = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        self.tail = self.buffer[sum(sizes) :]

    @property
    def side_buffer_bytes(self) -> int:
        """Bytes of the buffer this rank keeps aside, where it needs one."""
        return self.buffer.numel() * self.buffer.element_size() if self.moves else 0

    def sync(self) -> None:
        """Leave in every ``main_grad`` the sum over replicas."""
        for _, parameter in self.sharded:
            main_grad(parameter).mul_(self.scale)
        for parameter in self.replicated:
            main_grad(parameter).mul_(self.scale)
        if self.moves:
            self._exchange(forth=True)
        elif self.meets:
            self._copy(out=True)
        if self.meets:
            pack([main_grad(p) for p in self.replicated], self.tail)
            dist.all_reduce(self.buffer, group=mpu.get_data_parallel_group())
            unpack(self.tail, [main_grad(p) for p in self.replicated])
        if self.moves:
            self._exchange(forth=False)
            self._pass_replicated_on()
        elif self.meets:
            self._copy(out=False)

    def _copy(self, out: bool) -> None:
        for (_, parameter), target in zip(self.sharded, self.targets, strict=True):
            if out:
                target.copy_(main_grad(parameter))
            else:
                main_grad(parameter).copy_(target)

    def _exchange(self, forth: bool) -> None:
        """All-to-all between own gradients and the targets; what stays here is copied."""
        degree, me = self.state.cell.degree, self.state.tp_rank
        own = [self._own_views(j) if j < self.smallest else [] for j in range(degree)]
        aside = [self._target_views(i) if self.meets else [] for i in range(degree)]
        outgoing, incoming = (own, aside) if forth else (aside, own)
        for source, target in zip(outgoing[me], incoming[me], strict=True):
            target.copy_(source)
        send, receive = (
            [[] if i == me else views for i, views in enumerate(lists)]
            for lists in (outgoing, incoming)
        )
        send_sizes, receive_sizes = (
            [sum(view.numel() for view in views) for views in lists] for lists in (send, receive)
        )
        packed = torch.empty(sum(send_sizes), dtype=self.buffer.dtype)
        pack([view for views in send for view in views], packed)
        arrived = torch.empty(sum(receive_sizes), dtype=self.buffer.dtype)
        dist.all_to_all_single(
            arrived, packed, receive_sizes, send_sizes, group=self.state.tp_group
        )
        unpack(arrived, [view for views in receive for view in views])

    def _pass_replicated_on(self) -> None:
        flat = torch.empty(sum(p.numel() for p in self.replicated), dtype=self.buffer.dtype)
        pack([main_grad(p) for p in self.replicated], flat)
        dist.broadcast(flat, self.state.cell.ranks[0], group=self.state.tp_group)
        unpack(flat, [main_grad(p) for p in self.replicated])

    def _own_views(self, target: int) -> list[torch.Tensor]:
        """This rank's gradients that go to rank ``target`` of the smallest degree."""
        found = []
        for name, parameter in self.sharded:
            cut = self._cut(name)
            mine = self.state.cell.share(cut.axis, self.state.tp_rank)
            theirs = self._aside.share(cut.axis, target)
            found += _views(main_grad(parameter), cut, mine, theirs)
        return found

    def _target_views(self, source: int) -> list[torch.Tensor]:
        """The parts of this rank's targets that come from rank ``source`` of the cell."""
        found = []
        for (name, _), target in zip(self.sharded, self.targets, strict=True):
            cut = self._cut(name)
            mine = self._aside.share(cut.axis, self.state.tp_rank)
            found += _views(target, cut, mine, self.state.cell.share(cut.axis, source))
        return found

    def _target_shape(self, name: str, parameter: torch.nn.Parameter) -> tuple[int, ...]:
        cut = self._cut(name)
        shape = list(parameter.shape)
        shape[cut.dim] = local_extent(self.state.plan, self._aside.ranks[self.state.tp_rank], cut)
        return tuple(shape)

    def _cut(self, name: str) -> Cut:
        cut = cut_of(name, self.state.plan.model)
        assert cut is not None
        return cut


def _views(tensor: torch.Tensor, cut: Cut, held: range, wanted: range) -> list[torch.Tensor]:
    """Views of the ``wanted`` units in ``tensor``, which holds the units ``held``."""
    start, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
    if start >= stop:
        return []
    run = tensor.shape[cut.dim] // cut.runs
    first, length = (start - held.start) * cut.per_unit, (stop - start) * cut.per_unit
    return [tensor.narrow(cut.dim, i * run + first, length) for i in range(cut.runs)]
