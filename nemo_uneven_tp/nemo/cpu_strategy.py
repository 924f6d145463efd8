"""NeMo's ``MegatronStrategy`` with only what it lacks on a machine without GPUs."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from nemo import lightning as nl

from nemo_uneven_tp.nemo.checkpoint import CheckedCheckpoints


class CheckedMegatronStrategy(CheckedCheckpoints, nl.MegatronStrategy):
    """The stock strategy; checkpoints are compared with their checksums before they are used."""


class CPUMegatronStrategy(CheckedMegatronStrategy):
    """The stock strategy, for :mod:`nemo_uneven_tp.cpu_mode`."""

    def setup_distributed(self) -> None:
        """As stock, and seed Megatron's RNG tracker, which NeMo does on GPUs only."""
        super().setup_distributed()
        model_parallel_cuda_manual_seed(torch.initial_seed())
