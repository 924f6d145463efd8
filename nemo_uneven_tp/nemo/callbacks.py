"""What a run reports: ``metrics.jsonl``, a console line per step, ``result.json``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl

from nemo_uneven_tp.nemo import replicas
from nemo_uneven_tp.nemo.logs import Console
from nemo_uneven_tp.run_files import METRICS_FILE, RESULT_FILE


class RunReport(pl.Callback):
    """Writes the metrics of every step on rank 0, and the result at the end.

    Args:
        run_dir: where ``metrics.jsonl`` and ``result.json`` go.
        console: the terminal; rank 0 prints one line per step.
        tokens_per_step: sequence length times samples of a global batch.
        check_replicas_every: steps between comparisons of the replicas; 0: only at the end.
    """

    def __init__(
        self,
        run_dir: Path,
        console: Console,
        *,
        tokens_per_step: int,
        global_batch_size: int,
        check_replicas_every: int = 0,
    ) -> None:
        self.run_dir = run_dir
        self.console = console
        self.tokens_per_step = tokens_per_step
        self.global_batch_size = global_batch_size
        self.check_replicas_every = check_replicas_every
        self._file: IO[str] | None = None
        self._started = 0.0
        self._lr = 0.0
        self._last: dict[str, Any] | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open ``metrics.jsonl``."""
        if trainer.is_global_zero:
            self._file = (self.run_dir / METRICS_FILE).open("a", encoding="utf-8")

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the time and the learning rate, which the scheduler changes before the end."""
        self._started = time.perf_counter()
        self._lr = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Report the step."""
        if trainer.is_global_zero:
            values = trainer.callback_metrics
            loss = float(values["reduced_train_loss"])
            grad_norm = float(values["grad_norm"]) if "grad_norm" in values else None
            seconds = time.perf_counter() - self._started
            self._report(
                trainer.max_steps,
                {
                    "step": trainer.global_step - 1,
                    "loss": loss,
                    "grad_norm": grad_norm,
                    "lr": self._lr,
                    "tokens": self.tokens_per_step,
                    "consumed_samples": trainer.global_step * self.global_batch_size,
                    "step_time_s": seconds,
                },
            )
        every = self.check_replicas_every
        if every and trainer.global_step % every == 0:
            replicas.check(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the validation loss."""
        loss = trainer.callback_metrics.get("val_loss")
        if trainer.is_global_zero and loss is not None:
            self.console.line(
                f"validation after step {trainer.global_step}  loss {float(loss):.6f}"
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Compare the replicas and write ``result.json``."""
        equal = replicas.replicas_equal(trainer)
        if not trainer.is_global_zero:
            return
        if self._file is not None:
            self._file.close()
            self._file = None
        result = {
            "steps": trainer.global_step,
            "final_loss": None if self._last is None else self._last["loss"],
            "tokens": trainer.global_step * self.tokens_per_step,
            "replicas_equal": equal,
        }
        _write_whole(self.run_dir / RESULT_FILE, json.dumps(result, indent=2) + "\n")

    def _report(self, max_steps: int, metrics: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()
        self._last = metrics
        norm = "-" if metrics["grad_norm"] is None else f"{metrics['grad_norm']:.4f}"
        width = len(str(max_steps))
        self.console.line(
            f"step {metrics['step'] + 1:>{width}}/{max_steps}  loss {metrics['loss']:.6f}  "
            f"grad norm {norm}  lr {metrics['lr']:.3e}  "
            f"{metrics['tokens'] / metrics['step_time_s']:,.0f} tokens/s  "
            f"{metrics['step_time_s']:.3f} s"
        )


def _write_whole(path: Path, text: str) -> None:
    """Write ``path`` so that a reader sees all of it or nothing."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
