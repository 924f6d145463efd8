"""The reported loss: mean over all tokens of the global batch, whatever each replica got."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from nemo.lightning.megatron_parallel import MaskedTokenLossReduction

from nemo_uneven_tp.parallel_state import get_state


class UnevenTokenLossReduction(MaskedTokenLossReduction):
    """NeMo's masked token loss, reduced over replicas of different degree.

    The stock class sums over the data-parallel group, where ranks of larger cells have no
    peer; here the first rank of each cell contributes and all ranks get the result.
    """

    def reduce(self, losses_reduced_per_micro_batch: list[dict[str, Any]]) -> torch.Tensor:
        """Mean loss over the tokens of the global batch, the same number on every rank."""
        device = torch.cuda.current_device()
        parts = [
            part
            for part in (x["loss_sum_and_ub_size"] for x in losses_reduced_per_micro_batch)
            if part[1] > 0
        ]
        total = torch.vstack(parts).sum(0) if parts else torch.zeros(2, device=device)
        if not get_state().is_leader:
            total = torch.zeros_like(total)
        dist.all_reduce(total)
        return total[0] / total[1]
