"""Activations and gradients between cells of any two degrees, on real processes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_uneven_tp import cpu_mode
from nemo_uneven_tp.parallel_state import (
    destroy_uneven_model_parallel,
    initialize_uneven_model_parallel,
)
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.planner import PlanRequest, make_plan
from nemo_uneven_tp.stage_boundary import block_of
from nemo_uneven_tp.stage_communication import UnevenP2PCommunicator
from nemo_uneven_tp.wire import count_traffic
from tests.distributed import RankPool
from tests.shapes import LLAMA3_8B

ROWS, BATCH, HIDDEN = 13, 2, 3
PAIRS = [(8, 1), (1, 8), (7, 2), (2, 7), (3, 4), (4, 3), (5, 3), (3, 5), (6, 2), (4, 4), (1, 2)]


def plan_of(here: int, there: int, sequence_parallel: bool) -> Plan:
    """Two stages of one replica; 13 rows are no multiple of any degree but 1."""
    nominal = max(here, there)
    plan = make_plan(
        PlanRequest(
            model=replace(LLAMA3_8B, num_layers=2, seq_length=ROWS, hidden_size=HIDDEN),
            tensor_model_parallel_size=nominal,
            world_size=2 * nominal,
            global_batch_size=BATCH,
            micro_batch_size=BATCH,
            degrees=[[here, there]],
            pipeline_model_parallel_size=2,
        )
    )
    return replace(plan, sequence_parallel=sequence_parallel)


def held(whole: torch.Tensor, plan: Plan, degree: int, tp_rank: int, filler: float) -> torch.Tensor:
    """What a rank of a cell holds of ``whole``; padding is filled."""
    if not plan.sequence_parallel:
        return whole.clone()
    rows = block_of(ROWS, degree)
    padded = torch.full((rows * degree, BATCH, HIDDEN), filler)
    padded[:ROWS] = whole
    return padded[tp_rank * rows : (tp_rank + 1) * rows]


def exchange(here: int, there: int) -> list[list[tuple[str, int]]]:
    """Pass one activation and its gradient over the boundary; what each rank sent."""
    cpu_mode.activate()
    sent = []
    for sequence_parallel in (False, True):
        plan = plan_of(here, there, sequence_parallel)
        if plan.has_stock_pipeline:
            continue
        state = initialize_uneven_model_parallel(plan)
        config: Any = SimpleNamespace(
            virtual_pipeline_model_parallel_size=None, timers=None, pipeline_dtype=torch.float32
        )
        communicator = UnevenP2PCommunicator(state, config)
        generator = torch.Generator().manual_seed(1)
        forward = torch.randn(ROWS, BATCH, HIDDEN, generator=generator)
        backward = torch.randn(ROWS, BATCH, HIDDEN, generator=generator)
        degree, tp_rank = state.cell.degree, state.tp_rank
        shape = (ROWS, BATCH, HIDDEN)
        with count_traffic() as traffic:
            if state.cell.stage == 0:
                output = held(forward, plan, degree, tp_rank, float("nan"))
                got = communicator.send_forward_recv_backward(output, shape, False)
                expected = held(backward, plan, degree, tp_rank, 0.0)
            else:
                got = communicator.recv_forward(shape, False)
                communicator.send_backward(held(backward, plan, degree, tp_rank, 7.0), False)
                expected = held(forward, plan, degree, tp_rank, 0.0)
        assert torch.equal(got, expected)
        assert got.requires_grad
        sent.append([(c.kind, c.nbytes) for c in traffic.calls])
        destroy_uneven_model_parallel()
    return sent


@pytest.mark.parametrize(("here", "there"), PAIRS)
def test_every_element_crosses_once(ranks: RankPool, here: int, there: int) -> None:
    """Sent bytes of both cells together: those of one activation and one gradient."""
    by_rank = ranks.run(exchange, here + there, here=here, there=there, timeout_s=60)
    activation = 4 * ROWS * BATCH * HIDDEN
    for case in zip(*by_rank, strict=True):
        assert sum(n for calls in case for kind, n in calls if kind == "send") == 2 * activation
        first = [n for calls in case[:here] for kind, n in calls if kind == "send"]
        assert sum(first) == activation
