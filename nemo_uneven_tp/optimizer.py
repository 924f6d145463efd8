"""Megatron's optimizers over uneven replicas.

Without the distributed optimizer, Adam and SGD work element by element, so each rank steps its
own share with Megatron's own classes. Only the statistics over all gradients need care: they
must count each element once and be the same number on every rank, or replicas drift apart in
the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from nemo_uneven_tp.checkpoint import stock_fixes
from nemo_uneven_tp.distributed_optimizer import build_distributed_optimizer, refuse_unsupported
from nemo_uneven_tp.model_shape import parameters
from nemo_uneven_tp.parallel_state import get_state
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.shares import Axis


def get_uneven_optimizer(
    config: OptimizerConfig,
    model_chunks: list[torch.nn.Module],
    build: Callable[..., MegatronOptimizer] = get_megatron_optimizer,
    **kwargs: Any,
) -> MegatronOptimizer:
    """Like ``get_megatron_optimizer`` (same arguments), for chunks wrapped in our DDP."""
    state = get_state()
    if state.plan.is_uniform:
        stock_fixes.apply()
        return _without_dummy_zeros(build(config, model_chunks, **kwargs), state.plan)
    if config.use_distributed_optimizer:
        return build_distributed_optimizer(config, model_chunks, build, **kwargs)
    refuse_unsupported(config)
    # Megatron leaves parameters marked "shared" out of gradient statistics: only the first
    # replica counts, a tied embedding in the first stage, and the sum runs over the world.
    tied_copy = state.plan.ties_stages and state.cell.stage > 0
    for chunk in model_chunks:
        for name, param in chunk.named_parameters():
            copy = tied_copy and name.endswith("output_layer.weight")
            setattr(param, "shared", state.cell.replica != 0 or copy)  # noqa: B010
    optimizer = build(config, model_chunks, **kwargs)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.grad_stats_parallel_group = dist.group.WORLD
    return _without_dummy_zeros(optimizer, state.plan)


def _without_dummy_zeros(optimizer: MegatronOptimizer, plan: Plan) -> MegatronOptimizer:
    """Leave the dummy vocabulary rows of the first replica, always zero, out of ``count_zeros``."""
    dummies = 0
    for stage in {0, plan.stages - 1}:
        cell = plan.cell(0, stage)
        rows = cell.shares[Axis.VOCAB][1] * cell.degree - plan.vocab_size
        for parameter in parameters(plan.model, plan.vocab_size, plan.layers(stage)):
            tied_copy = plan.ties_stages and stage > 0
            if parameter.cut and parameter.cut.axis is Axis.VOCAB and not tied_copy:
                dummies += parameter.elements(rows)
    if dummies:
        stock = optimizer.count_zeros
        optimizer.count_zeros = lambda: stock() - dummies
    return optimizer
