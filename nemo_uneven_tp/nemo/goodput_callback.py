"""Records what a NeMo run does, in ``events.jsonl``: our runs, stock runs and recipes.

    trainer = nl.Trainer(..., callbacks=[GoodputCallback("runs/mine")])
    recipe.trainer.callbacks.append(run.Config(GoodputCallback, run_dir="runs/mine"))

``uneven-tp goodput report runs/mine`` then tells what the time went into. Rank 0 alone writes,
one short line a step; nothing is synchronized, neither ranks nor devices.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from nemo.lightning.callback_group import CallbackGroup

from nemo_uneven_tp import ranks
from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.events import (
    ATTEMPT_VARIABLE,
    EVENTS_FILE,
    EventWriter,
    attempt_of_environment,
    next_attempt,
    process_started_at,
)
from nemo_uneven_tp.nemo.shape import model_shape


class GoodputCallback(pl.Callback):
    """Writes the events of rank 0 to ``events.jsonl``.

    Args:
        run_dir: the folder of ``events.jsonl``; the same for all restarts of a job.
        process_start_written: whether the process has recorded its own start already.
    """

    def __init__(self, run_dir: str | Path, process_start_written: bool = False) -> None:
        self.run_dir = str(run_dir)
        self.process_start_written = process_start_written
        self._events: EventWriter | None = None
        self._saves: _Saves | None = None
        self._tokens = 0
        self._started = 0.0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Process groups exist; checkpoints are loaded next."""
        if not trainer.is_global_zero or self._events is not None:
            return
        path = Path(self.run_dir) / EVENTS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        told = os.environ.get(ATTEMPT_VARIABLE)
        attempt = next_attempt(path) if told is None else attempt_of_environment()
        rank = ranks.nominal_rank() if ranks.launched() else trainer.global_rank
        self._events = EventWriter(path, attempt=attempt, rank=rank)
        if not self.process_start_written:
            self._events.write("process_start", t=process_started_at())
        self._events.write("groups_done")
        self._record_loads(trainer.strategy)
        self._saves = _Saves(self._events)
        # NeMo's own door: its ModelCheckpoint reports there, also what is saved asynchronously.
        CallbackGroup.get_instance().callbacks.append(self._saves)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Close the file."""
        callbacks = CallbackGroup.get_instance().callbacks
        if self._saves in callbacks:
            callbacks.remove(self._saves)
        if self._events is not None:
            self._events.close()
        self._events = self._saves = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """All is loaded and built."""
        if self._events is None:
            return
        about = _about(trainer, pl_module)
        self._tokens = about["tokens_per_step"] or 0
        self._events.write("train_start", step=trainer.global_step, **about)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note the time."""
        self._started = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Record the step."""
        if self._events is not None:
            self._events.write(
                "step",
                step=trainer.global_step - 1,
                tokens=self._tokens,
                duration_s=round(time.perf_counter() - self._started, 6),
            )

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record it."""
        self._write("validation_start", trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record it."""
        self._write("validation_end", trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record it."""
        self._write("train_end", trainer)

    def _write(self, event: str, trainer: pl.Trainer) -> None:
        if self._events is not None:
            self._events.write(event, step=trainer.global_step)

    def _record_loads(self, strategy: Any) -> None:
        """Lightning tells callbacks when a checkpoint has been read, but not when it begins."""
        events, load = self._events, strategy.load_checkpoint
        assert events is not None

        @wraps(load)
        def recorded(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
            events.write("load_start", path=str(checkpoint_path))
            loaded = load(checkpoint_path, *args, **kwargs)
            step = loaded.get("global_step") if isinstance(loaded, dict) else None
            events.write("load_end", path=str(checkpoint_path), step=step)
            return loaded

        strategy.load_checkpoint = recorded


class _Saves:
    """Listens to what NeMo's ``ModelCheckpoint`` tells its ``CallbackGroup``."""

    def __init__(self, events: EventWriter) -> None:
        self.events = events
        self._step: int | None = None
        self._started = 0.0

    def on_save_checkpoint_start(self, global_step: int) -> None:
        """Training stands still from here on."""
        self._step, self._started = global_step, time.perf_counter()
        self.events.write("save_start", step=global_step)

    def on_save_checkpoint_success(self, global_step: int) -> None:
        """The checkpoint is complete; for an asynchronous one some steps later."""
        self.events.write("save_complete", step=global_step)

    def on_save_checkpoint_end(self) -> None:
        """Training goes on."""
        seconds = round(time.perf_counter() - self._started, 6)
        self.events.write("save_end", step=self._step, duration_s=seconds)


def _about(trainer: Any, module: Any) -> dict[str, Any]:
    """Layout, batch and what makes the job comparable, as far as NeMo's objects tell."""
    plan = getattr(trainer.strategy, "plan", None)
    datamodule = trainer.datamodule
    sampler = getattr(trainer.strategy, "data_sampler", None) or getattr(
        datamodule, "data_sampler", None
    )
    batch = getattr(sampler, "global_batch_size", None)
    length = getattr(sampler, "seq_len", None)
    tokenizer = getattr(module, "tokenizer", None)
    model = None
    try:
        if plan is not None:
            model = asdict(plan.model)
        elif hasattr(module, "config"):
            model = asdict(model_shape(module.config, getattr(tokenizer, "vocab_size", None)))
    except (AttributeError, UserError):
        pass  # not a dense GPT; such a run can be reported on, but not compared
    world_size = trainer.world_size
    return {
        "degrees": None if plan is None else plan.degree_table,
        "world_size": world_size,
        "nominal_world_size": world_size if plan is None else plan.nominal_world_size,
        "tokens_per_step": batch * length if batch and length else None,
        "fingerprint": {
            "model": model,
            "batch": {"global_batch_size": batch, "seq_length": length},
            "data": _data(datamodule),
        },
    }


def _data(datamodule: Any) -> dict[str, Any]:
    """What the data module says about its text. Keys differ from those of our own launcher,
    which knows the text itself."""
    paths = getattr(datamodule, "paths", None)
    return {
        "module": type(datamodule).__name__,
        "paths": None if paths is None else str(paths),
        "module_seed": getattr(datamodule, "seed", None),
        "module_split": getattr(datamodule, "split", None),
    }
