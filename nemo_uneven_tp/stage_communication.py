"""Megatron's point-to-point communicator for pipeline stages of different degree.

:class:`UnevenP2PCommunicator` stands in for Megatron's ``P2PCommunicator`` in its own 1F1B and
interleaved schedules; only what happens in one exchange is replaced. Ranks of two neighbouring
cells exchange the parts :mod:`.stage_boundary` lists; without sequence parallelism the
receiving cell then gathers them, so all its ranks hold bitwise the same tensor. Padding that
sequence parallelism needs in one cell never leaves it: it arrives as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection

from nemo_uneven_tp.parallel_state import UnevenState, get_state
from nemo_uneven_tp.plan import Cell
from nemo_uneven_tp.stage_boundary import block_of, row_boundaries, transfers


class Pending:
    """Messages under way; ``wait`` finishes them and puts what came where it belongs."""

    def __init__(
        self, works: Sequence[dist.Work], kept: Any, finish: Callable[[], None] | None = None
    ) -> None:
        self._works = list(works)
        self._kept = kept  # tensors must outlive the messages that read or fill them
        self._finish = finish

    def wait(self) -> None:
        """Wait; a second call does nothing."""
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        self._works, self._kept, self._finish = [], None, None


class Boundary:
    """This rank's side of the border between its cell and a neighbouring stage's.

    Args:
        group: of the ranks of both cells.
    """

    def __init__(self, state: UnevenState, there: Cell, group: dist.ProcessGroup) -> None:
        self.state = state
        self.here = state.cell
        self.there = there
        self.group = group
        self.rows = state.plan.model.seq_length
        self.sequence_parallel = state.plan.sequence_parallel

    def sends(self, tensor: torch.Tensor) -> tuple[list[dist.P2POp], Any]:
        """Operations that send this rank's part of ``tensor``, and what to keep until then."""
        width = tensor[0].numel()
        flat = tensor.detach().contiguous().view(-1)
        start = self._first_row(width) if self.sequence_parallel else 0
        ops = [
            self._op(dist.isend, flat[t.start - start : t.stop - start], t.receiver)
            for t in transfers(
                self.rows, width, self.here.degree, self.there.degree, self.sequence_parallel
            )
            if t.sender == self.state.tp_rank
        ]
        return ops, flat

    def receives(
        self, micro_batch_size: int, hidden_size: int, dtype: torch.dtype
    ) -> tuple[list[dist.P2POp], torch.Tensor, Callable[[], None] | None]:
        """Operations that fill the returned tensor; the callable makes it whole afterwards."""
        width = micro_batch_size * hidden_size
        degree = self.here.degree
        finish: Callable[[], None] | None = None
        if self.sequence_parallel:
            rows = block_of(self.rows, degree)
            flat = torch.zeros(rows * width, dtype=dtype, device=torch.cuda.current_device())
            start = self._first_row(width)
        else:
            rows = self.rows
            part = block_of(rows * width, degree)
            whole = torch.empty(part * degree, dtype=dtype, device=torch.cuda.current_device())
            own = whole[self.state.tp_rank * part : (self.state.tp_rank + 1) * part]
            flat, start = whole[: rows * width], 0
            if degree > 1:
                finish = partial(_gather, whole, own, self.state.tp_group)
        ops = [
            self._op(dist.irecv, flat[t.start - start : t.stop - start], t.sender)
            for t in transfers(self.rows, width, self.there.degree, degree, self.sequence_parallel)
            if t.receiver == self.state.tp_rank
        ]
        received = flat.view(rows, micro_batch_size, hidden_size).detach().requires_grad_()
        return ops, received, finish

    def _first_row(self, width: int) -> int:
        return row_boundaries(self.rows, width, self.here.degree)[self.state.tp_rank]

    def _op(self, kind: Callable[..., Any], part: torch.Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, part, self.there.ranks[peer], self.group)


class UnevenP2PCommunicator(P2PCommunicator):
    """Exchanges activations and gradients with the neighbouring stages of this replica."""

    def __init__(self, state: UnevenState, config: Any) -> None:
        super().__init__(mpu.get_pipeline_model_parallel_group(), config)
        cells = state.plan.cells_of_replica(state.cell.replica)
        stage, stages = state.cell.stage, state.plan.stages
        self.previous = self._boundary(state, cells[stage - 1], (stage - 1) % stages)
        self.following = self._boundary(state, cells[(stage + 1) % stages], stage)

    @staticmethod
    def _boundary(state: UnevenState, there: Cell, first: int) -> Boundary | None:
        group = state.boundaries.get(first)
        return None if group is None else Boundary(state, there, group)

    def _communicate(
        self,
        *,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[str, Pending] | None]:
        """One exchange, in both directions at once; arguments and results are the stock ones.

        Of ``tensor_shape`` only micro-batch and hidden size count; rows follow from the plan.
        """
        pending: dict[str, Pending] = {}
        received: dict[str, torch.Tensor | None] = {"prev": None, "next": None}
        wanted = (
            ("prev", self.previous, tensor_send_prev, recv_prev),
            ("next", self.following, tensor_send_next, recv_next),
        )
        for name, boundary, tensor, receives in wanted:
            if tensor is None and not receives:
                continue
            assert boundary is not None
            ops: list[dist.P2POp] = []
            kept: list[Any] = []
            finish = None
            if tensor is not None:
                ops, sent = boundary.sends(tensor)
                kept.append(sent)
            if receives:
                more, received[name], finish = boundary.receives(
                    tensor_shape[1], tensor_shape[2], self.config.pipeline_dtype
                )
                ops += more
                kept.append(received[name])
            # Together, so that neither of two ranks that send to each other waits.
            works = dist.batch_isend_irecv(ops) if ops else []
            both = Pending(works, kept, finish)
            if tensor is not None:
                pending[f"send_{name}"] = both
            if receives:
                pending[f"recv_{name}"] = both
        if wait_on_reqs:
            for one in pending.values():
                one.wait()
        return received["prev"], received["next"], None if wait_on_reqs else pending


def _gather(whole: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_gather_into_tensor(whole, own, group=group)


def uneven_forward_backward_func(config: Any) -> Callable[..., Any]:
    """Megatron's schedule for this layout, over our communicator where degrees differ."""
    state = get_state()
    schedule = get_forward_backward_func()
    if state.plan.stages == 1 or state.plan.has_stock_pipeline:
        return schedule
    groups = ProcessGroupCollection()
    groups.tp = state.tp_group
    groups.pp = mpu.get_pipeline_model_parallel_group()
    groups.cp = mpu.get_context_parallel_group()
    groups.embd = mpu.get_embedding_group(check_initialized=False)
    groups.pos_embd = mpu.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = mpu.get_data_parallel_group(with_context_parallel=True)
    communicator = UnevenP2PCommunicator(state, config)
    return partial(schedule, p2p_communicator=communicator, pg_collection=groups)
