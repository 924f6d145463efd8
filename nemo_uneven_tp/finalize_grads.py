"""What follows the backward pass: finish gradient sync, divide by tokens.

Stands in for Megatron's ``finalize_model_grads`` (same signature), which reduces over the
data-parallel group first and sums sequence-parallel gradients inside the cell last; both
need every rank to have a peer in every replica.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads as stock_finalize_model_grads
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.utils import get_model_config

from nemo_uneven_tp.parallel_state import get_state


def finalize_model_grads(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: Any
) -> None:
    """Finish gradient sync of all model chunks; with ``num_tokens``, divide by the global number.

    ``num_tokens`` is this replica's number of tokens that count (per-token loss).
    """
    state = get_state()
    if state.plan.is_uniform:
        stock_finalize_model_grads(model, num_tokens, **kwargs)
        return
    for chunk in model:
        chunk.finish_grad_sync()  # type: ignore[operator]
    reset_model_temporary_tensors(get_model_config(model[0]), model)
    if num_tokens is None:
        return
    total = num_tokens.clone()
    if not state.is_leader or state.cell.stage != state.plan.stages - 1:
        total.zero_()  # one contribution per replica, from its last stage
    dist.all_reduce(total)
    if total.item() > 0:
        for chunk in model:
            chunk.scale_gradients(1.0 / total.item())  # type: ignore[operator]
