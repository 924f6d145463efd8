"""Sequence parallelism where the sequence is no multiple of a cell's degree.

The cell pads its sequence at the end to the next multiple (design section 3). By causality no
real position sees the padding; its losses are cut off, so its gradients are zero. Padding
never leaves the cell: neighbouring stages exchange real rows only (:mod:`.stage_boundary`).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel

from nemo_uneven_tp.parallel_state import get_state


def pad_sequence(model: GPTModel) -> None:
    """Have ``model`` pad what it is given and cut off what it returns, if its cell needs it."""
    state = get_state()
    if not state.plan.sequence_parallel or state.plan.model.seq_length % state.cell.degree == 0:
        return
    stock = model.forward
    signature = inspect.signature(stock)
    degree = state.cell.degree

    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        values = given.arguments
        rows = state.plan.model.seq_length
        more = -rows % degree
        for name in ("input_ids", "position_ids", "labels", "loss_mask"):
            if values.get(name) is not None:
                values[name] = F.pad(values[name], (0, more))
        mask = values.get("attention_mask")
        if mask is not None:
            # True: hidden. Padding sees the first position, so that no row hides everything.
            mask = F.pad(mask, (0, more, 0, more), value=True)
            mask[..., rows:, 0] = False
            values["attention_mask"] = mask
        output = stock(*given.args, **given.kwargs)
        if not model.post_process:
            return output
        # Losses are [batch, sequence], logits [batch, sequence, vocabulary].
        return output[:, :rows].contiguous() if torch.is_tensor(output) else output

    # An instance attribute: torch calls it in place of the method.
    setattr(model, "forward", forward)  # noqa: B010
