"""Checkpoints of a run, through NeMo's own path.

NeMo's ``ModelCheckpoint`` decides when, its ``MegatronCheckpointIO`` writes and reads. Added
here: a manifest with checksums once a checkpoint is complete, the comparison with it before a
checkpoint is used, and the way back to an older one.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from nemo import lightning as nl
from nemo.lightning.ckpt_utils import ckpt_to_dir
from nemo.lightning.io import pl as checkpoint_io
from nemo.lightning.pytorch.callbacks import ModelCheckpoint

from nemo_uneven_tp.checkpoint import files
from nemo_uneven_tp.checkpoint.together import damages_together, write_manifest_together
from nemo_uneven_tp.errors import UserError


class RunCheckpoints(ModelCheckpoint):
    """NeMo's ``ModelCheckpoint`` that keeps the newest ones and writes manifests.

    Args:
        folder: where checkpoints go, as ``step_N`` after N steps.
        every_n_steps: steps between two; the last step of a run is saved too.
        keep: how many of the newest stay (``None``: all).
        about: what the manifests say about the run besides the step.
    """

    def __init__(
        self, folder: Path, every_n_steps: int, keep: int | None, about: Mapping[str, Any]
    ) -> None:
        super().__init__(
            dirpath=str(folder),
            filename="step_{step}",
            auto_insert_metric_name=False,
            enable_version_counter=False,
            monitor="step",
            mode="max",
            save_top_k=-1 if keep is None else keep,
            save_last="link",
            every_n_train_steps=every_n_steps,
            save_optim_on_train_end=True,
            always_save_context=False,
            save_context_on_train_end=False,
            verbose=False,
        )
        self.about = dict(about)
        self._removals: list[threading.Thread] = []

    def _monitor_candidates(self, trainer: Any) -> dict[str, torch.Tensor]:
        # NeMo logs a "step" that counts from 0.
        return {**super()._monitor_candidates(trainer), "step": torch.tensor(trainer.global_step)}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """As Lightning's: NeMo's own moves the run's files away and adds logs of its own."""
        super(ModelCheckpoint, self).on_train_start(trainer, pl_module)

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        # A folder of that name is of a checkpoint that could not be used.
        folder = ckpt_to_dir(filepath)
        if trainer.is_global_zero and folder.is_dir():
            self.set_checkpoint_unfinished_marker(filepath)
            shutil.rmtree(folder)
        super()._save_checkpoint(trainer, filepath)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step, unless it has been."""
        if trainer.global_step and self._last_global_step_saved != trainer.global_step:
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
            self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
        super().on_train_end(trainer, pl_module)

    def _remove_checkpoint(self, trainer: Any, filepath: str, override_async: bool = False) -> None:
        # With async saves NeMo removes in a thread, and takes the mark away before it is done.
        if not (self.async_save and override_async):
            super()._remove_checkpoint(trainer, filepath, override_async)
            return
        self.set_checkpoint_unfinished_marker(filepath, barrier_after=True)
        if trainer.is_global_zero:
            removal = threading.Thread(target=self._remove_and_unmark, args=(trainer, filepath))
            self._removals = [r for r in self._removals if r.is_alive()] + [removal]
            removal.start()

    def _remove_and_unmark(self, trainer: Any, filepath: str) -> None:
        super(ModelCheckpoint, self)._remove_checkpoint(trainer, filepath)
        self.remove_checkpoint_unfinished_marker(filepath)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait for the removal of outdated checkpoints."""
        for removal in self._removals:
            removal.join()
        super().teardown(trainer, pl_module, stage)

    def _get_finalize_save_checkpoint_callback(
        self, trainer: Any, filepath: str, global_step: int
    ) -> Callable[[], None]:
        stock = super()._get_finalize_save_checkpoint_callback(trainer, filepath, global_step)
        about = {**self.about, "step": global_step}

        def finalize() -> None:
            write_manifest_together(ckpt_to_dir(filepath), about)
            stock()

        return finalize


class Resume(nl.AutoResume):
    """NeMo's ``AutoResume`` for a checkpoint that has been found already."""

    def __init__(self, checkpoint: files.Checkpoint | None) -> None:
        super().__init__(resume_from_path=None if checkpoint is None else str(checkpoint.weights))
        self.checkpoint = checkpoint

    def get_trainer_ckpt_path(self, model: Any = None) -> Path | None:
        """The weights folder of the checkpoint."""
        return None if self.checkpoint is None else self.checkpoint.weights

    def setup(self, trainer: Any, model: Any = None) -> None:
        """Have the trainer start from it.

        Stock also calls it the callback's newest checkpoint, which is then removed as outdated.
        """
        if self.checkpoint is not None:
            trainer.ckpt_path = self.checkpoint.weights


class CheckedCheckpoints:
    """What strategies add to stock reading of checkpoints; goes before ``MegatronStrategy``.

    ``resume_from`` lists the checkpoints that may be used, the wanted one first. Set it before
    training; empty, what is asked for is read as it is.
    """

    resume_from: Sequence[files.Checkpoint] = ()
    fall_back = False
    say: Callable[[str], None] = staticmethod(lambda line: None)

    def load_checkpoint(self, checkpoint_path: Any, selective_restore: bool = False) -> Any:
        """Read the first checkpoint that is not damaged, or stop."""
        if self.resume_from and not selective_restore:
            checkpoint_path = self._choose().weights
            self.trainer.ckpt_path = checkpoint_path  # type: ignore[attr-defined]
        return super().load_checkpoint(checkpoint_path, selective_restore)  # type: ignore[misc]

    def _choose(self) -> files.Checkpoint:
        for position, checkpoint in enumerate(self.resume_from):
            found = damages_together(checkpoint.path)
            if not found:
                if position:
                    self.say(f"resuming from {checkpoint.path} instead")
                return checkpoint
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            what = f"{checkpoint.path} is damaged: {found[0]}{more}"
            if not self.fall_back:
                older = len(self.resume_from) - position - 1
                ways = "resume.from=... names another one"
                if older:
                    ways = (
                        f"resume.fall_back=true takes the newest good one of {older} older, {ways}"
                    )
                raise UserError(f"resume: {what}; {ways}")
            self.say(what)
        raise UserError(
            f"resume: none of the {len(self.resume_from)} checkpoints at "
            f"{self.resume_from[0].path.parent} is whole; resume.from=... names another one"
        )

    def load_optimizer_state_dict(
        self, checkpoint: Mapping[str, Any], selective_restore: bool = False
    ) -> None:
        """As stock, without its device mesh: that needs CUDA and equal data-parallel groups."""
        if not self.should_restore_optimizer_states(  # type: ignore[attr-defined]
            selective_restore=selective_restore
        ):
            return
        optimizers = self.optimizers  # type: ignore[attr-defined]
        for optimizer, state in zip(optimizers, checkpoint["optimizer"], strict=True):
            optimizer.load_state_dict(state)


def read_on_cpu() -> None:
    """Let NeMo read checkpoints without CUDA: it asserts that CUDA is in use."""
    if not torch.cuda.is_available():
        checkpoint_io._fix_tensors_device = lambda checkpoint: checkpoint  # noqa: SLF001


def complete_in(run_dir: Path, say: Callable[[str], None]) -> list[files.Checkpoint]:
    """The complete checkpoints of a run, newest first; says which ones are not."""
    if not (run_dir / files.FOLDER).is_dir():
        return []
    found = files.find(run_dir)
    for checkpoint in found:
        if checkpoint.problem is not None:
            say(f"{checkpoint.path} is not complete and left aside: {checkpoint.problem}")
    return files.complete(found)
