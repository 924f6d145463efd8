"""NeMo's ``MegatronStrategy`` with only what it lacks on a machine without GPUs."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from nemo import lightning as nl


class CPUMegatronStrategy(nl.MegatronStrategy):
    """The stock strategy, for :mod:`nemo_uneven_tp.cpu_mode`."""

    def setup_distributed(self) -> None:
        """As stock, and seed Megatron's RNG tracker, which NeMo does on GPUs only."""
        super().setup_distributed()
        model_parallel_cuda_manual_seed(torch.initial_seed())
