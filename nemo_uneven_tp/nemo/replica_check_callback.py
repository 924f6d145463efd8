"""A Lightning callback that stops a run whose replicas have come apart."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from nemo_uneven_tp.nemo import replicas


class ReplicaCheck(pl.Callback):
    """Compares the replicas bit by bit every ``every`` steps; see :mod:`.replicas`."""

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
        if trainer.global_step % self.every == 0:
            replicas.check(trainer)
