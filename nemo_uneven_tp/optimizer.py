"""Megatron's optimizers over uneven replicas.

Without the distributed optimizer, Adam and SGD work element by element, so each rank steps its own share with Megatron's own
classes. Only the statistics over all gradients need care: they must count each element once
and be the same number on every rank, or replicas drift apart in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer

from nemo_uneven_tp.distributed_optimizer import build_distributed_optimizer, refuse_unsupported
from nemo_uneven_tp.parallel_state import get_state


def get_uneven_optimizer(
    config: OptimizerConfig,
    model_chunks: list[torch.nn.Module],
    build: Callable[..., MegatronOptimizer] = get_megatron_optimizer,
    **kwargs: Any,
) -> MegatronOptimizer:
    """Like ``get_megatron_optimizer`` (same arguments), for chunks wrapped in our DDP."""
    state = get_state()
    if state.plan.is_uniform:
        return build(config, model_chunks, **kwargs)
    if config.use_distributed_optimizer:
        return build_distributed_optimizer(config, model_chunks, build, **kwargs)
    refuse_unsupported(config)
    # Megatron leaves parameters marked "shared" out of gradient statistics: only the first
    # replica counts, and the sum runs over the world.
    for chunk in model_chunks:
        for param in chunk.parameters():
            param.shared = state.cell.replica != 0
    optimizer = build(config, model_chunks, **kwargs)
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        part.grad_stats_parallel_group = dist.group.WORLD
    return optimizer
