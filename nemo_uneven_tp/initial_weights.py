"""Initial weights that do not depend on the degrees.

On CPU (``use_cpu_initialization``) stock Megatron draws the whole "master" weight on every
rank from one random stream and keeps its slice. :class:`ReferenceInit` stands in for the
config's ``init_method`` of one parameter: it draws the master exactly as the undamaged run
at the reference degree would, and puts this rank's share where the stock code will look for
it. So all replicas start equal, and equal to that run.

On GPUs Megatron draws each rank's shard from a seed per rank; :func:`broadcast_by_segment`
then copies the weights of one whole replica to the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from nemo_uneven_tp.megatron_versions import GATED_FC1_STRIDE
from nemo_uneven_tp.model_shape import Cut, Parameter, parameters
from nemo_uneven_tp.parallel_state import UnevenState
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.segment_views import pack, pieces_of, unpack
from nemo_uneven_tp.shares import Axis

InitMethod = Callable[[torch.Tensor], object]


class ReferenceInit:
    """An ``init_method`` that fills this rank's share from the reference run's draw.

    Args:
        original: the ``init_method`` the stock config has.
        parameter: the parameter's global shape and cut.
        units: the units this rank owns along the cut axis.
        degree, tp_rank: of this rank's cell.
        reference_degree: the undamaged layout to reproduce.
    """

    def __init__(
        self,
        original: InitMethod,
        parameter: Parameter,
        units: range,
        degree: int,
        tp_rank: int,
        reference_degree: int,
    ) -> None:
        if parameter.cut is None:
            raise ValueError(f"{parameter.name} is not cut")
        self.original = original
        self.shape = parameter.shape
        self.cut: Cut = parameter.cut
        self.units = units
        self.degree = degree
        self.tp_rank = tp_rank
        self.reference_degree = reference_degree

    def __call__(self, tensor: torch.Tensor) -> None:
        """Initialize ``tensor``: a master (plain tensor, CPU) or a local shard (Parameter)."""
        if isinstance(tensor, torch.nn.Parameter):
            self.original(tensor)
            return
        full = torch.empty(self.shape, dtype=tensor.dtype)
        self.original(full)
        dim = self.cut.dim
        full = stock_to_canonical(full, self.cut, self.reference_degree)
        start, stop = (u * self.cut.per_unit for u in (self.units.start, self.units.stop))
        runs = full.unflatten(dim, (self.cut.runs, -1)).narrow(dim + 1, start, stop - start)
        tensor.zero_()  # dummy vocabulary rows
        # Where the stock code looks: block tp_rank of each of `stride` parts, one after the other.
        stride = _stride(self.cut)
        local = tensor.unflatten(dim, (stride, self.degree, -1)).select(dim + 1, self.tp_rank)
        mine = runs.flatten(dim, dim + 1).unflatten(dim, (stride, -1))
        local.narrow(dim + 1, 0, mine.shape[dim + 1]).copy_(mine)


def unwrap(init_method: InitMethod) -> InitMethod:
    """The original behind a :class:`ReferenceInit`, or ``init_method`` itself."""
    return init_method.original if isinstance(init_method, ReferenceInit) else init_method


def _stride(cut: Cut) -> int:
    return GATED_FC1_STRIDE if cut.runs == 2 else 1


def stock_to_canonical(full: torch.Tensor, cut: Cut, degree: int) -> torch.Tensor:
    """A stock master at ``degree`` in canonical order ``[run 0 of all units; run 1; ...]``.

    They differ for a gated ``linear_fc1`` where Megatron cuts its master into ``degree`` equal
    chunks and reads each as ``[gate; up]`` (see :data:`.megatron_versions.GATED_FC1_STRIDE`).
    """
    if cut.runs == _stride(cut) or degree == 1:
        return full
    chunks = full.unflatten(cut.dim, (degree, cut.runs, -1))
    return chunks.transpose(cut.dim, cut.dim + 1).flatten(cut.dim, cut.dim + 2)


def canonical_to_stock(full: torch.Tensor, cut: Cut, degree: int) -> torch.Tensor:
    """The inverse of :func:`stock_to_canonical`."""
    if cut.runs == _stride(cut) or degree == 1:
        return full
    chunks = full.unflatten(cut.dim, (cut.runs, degree, -1))
    return chunks.transpose(cut.dim, cut.dim + 1).flatten(cut.dim, cut.dim + 2)


def broadcast_by_segment(module: torch.nn.Module, state: UnevenState, source: int = 0) -> None:
    """Copy the parameters of replica ``source`` to all replicas, segment by segment.

    Replicated parameters travel between the first ranks of the cells, then inside each cell.
    """
    plan = state.plan
    by_group: dict[tuple[int, ...], list[torch.Tensor]] = {ranks: [] for ranks in state.sync_groups}
    replicated: list[torch.Tensor] = []
    for name, parameter in module.named_parameters():
        for piece in pieces_of(plan, state.rank, name, parameter.shape):
            views = piece.views(parameter.data)
            if piece.segment is None:
                replicated.extend(views)
            else:
                by_group[piece.segment.owners].extend(views)
    for ranks, views in by_group.items():
        _broadcast(views, ranks[source], state.sync_groups[ranks])
    if state.leaders is not None:
        _broadcast(replicated, plan.leaders(state.cell.stage)[source], state.leaders)
    if state.cell.degree > 1:
        _broadcast(replicated, state.cell.ranks[0], state.tp_group)


def broadcast_tied(module: torch.nn.Module, state: UnevenState) -> None:
    """Copy the first replica's embedding to the tied weights of all first and last stages."""
    for name, parameter in module.named_parameters():
        for piece in pieces_of(state.plan, state.rank, name, parameter.shape):
            if piece.segment is not None and len(piece.segment.owners) > state.plan.replicas:
                ranks = piece.segment.owners
                _broadcast(piece.views(parameter.data), ranks[0], state.sync_groups[ranks])


def _broadcast(views: list[torch.Tensor], source: int, group: dist.ProcessGroup) -> None:
    for dtype in sorted({view.dtype for view in views}, key=str):
        same = [view for view in views if view.dtype == dtype]
        flat = torch.empty(sum(view.numel() for view in same), dtype=dtype, device=same[0].device)
        pack(same, flat)
        dist.broadcast(flat, source, group=group)
        unpack(flat, same)


class StockReferenceInit:
    """An ``init_method`` with which a *stock* run starts like one at another degree.

    Stock Megatron calls ``init_method`` with the whole master of each weight on CPU; the only
    one whose meaning depends on the degree is a gated ``linear_fc1``, told by its shape.

    Raises:
        ValueError: if another weight has that shape too.
    """

    def __init__(
        self, original: InitMethod, plan: Plan, degree: int, reference_degree: int
    ) -> None:
        (fc1,) = {p.shape for p in parameters(plan.model, plan.vocab_size) if _is_fc1(p)}
        others = {
            p.shape for p in parameters(plan.model, plan.vocab_size) if p.cut and not _is_fc1(p)
        }
        if fc1 in others:
            raise ValueError(f"several weights have the shape {fc1} of linear_fc1")
        self.original = original
        self.shape = fc1
        self.cut = Cut(axis=Axis.FFN, dim=0, per_unit=1, runs=2)
        self.degree = degree
        self.reference_degree = reference_degree

    def __call__(self, tensor: torch.Tensor) -> None:
        """Draw ``tensor``; reorder it if it is the master of ``linear_fc1``."""
        self.original(tensor)
        if tuple(tensor.shape) == self.shape and not isinstance(tensor, torch.nn.Parameter):
            canonical = stock_to_canonical(tensor, self.cut, self.reference_degree)
            tensor.copy_(canonical_to_stock(canonical, self.cut, self.degree))


def _is_fc1(parameter: Parameter) -> bool:
    return parameter.name.endswith("linear_fc1.weight")
