"""A Lightning callback that stops a run whose replicas have come apart."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from nemo_uneven_tp.nemo.callbacks import ReplicasDifferError
from nemo_uneven_tp.nemo.replicas import replicas_equal


class ReplicaCheck(pl.Callback):
    """Compares the replicas' weights bit by bit every ``every`` steps.

    Raises:
        ReplicasDifferError: from the step after which they differ.
    """

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Compare, if it is time."""
        if trainer.global_step % self.every == 0 and replicas_equal(trainer) is False:
            raise ReplicasDifferError(f"replicas differ after step {trainer.global_step - 1}")
