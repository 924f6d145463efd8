"""The files of a run directory: who may write there, and how config and plan get there.

``config.yaml`` and ``plan.json`` are written before any process starts, ``metrics.jsonl``,
``events.jsonl``, ``train.log`` and ``result.json`` by the run. Imports neither torch nor NeMo.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError

from nemo_uneven_tp.errors import UnevenTPError, UserError
from nemo_uneven_tp.events import EVENTS_FILE
from nemo_uneven_tp.plan import Plan

CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
METRICS_FILE = "metrics.jsonl"
LOG_FILE = "train.log"
RESULT_FILE = "result.json"

_POLL_S = 0.1


def refuse_used(run_dir: Path, resume: bool = False) -> None:
    """Check that a run may be started in ``run_dir``; writes nothing.

    Args:
        resume: go on with the run that may be there.

    Raises:
        UserError: if it holds another run, is no folder, or can't be written to.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"run_dir={run_dir} is not a folder; choose another one")
    for name in (CONFIG_FILE, PLAN_FILE, METRICS_FILE, EVENTS_FILE, LOG_FILE, RESULT_FILE):
        if (run_dir / name).exists() and not resume:
            raise UserError(
                f"run_dir={run_dir} holds another run ({name} is there); choose another one, or "
                "go on with it by resume.auto=true"
            )
    parent = run_dir
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"run_dir={run_dir} can't be created: {parent} can't be written to")


def create(run_dir: Path, config: Mapping[str, Any], plan: Plan, resume: bool = False) -> None:
    """Make ``run_dir`` with ``config.yaml`` and ``plan.json``.

    Both appear whole, ``plan.json`` last, so a process that waits for it finds both.

    Args:
        resume: replace those of the run that may be there.

    Raises:
        UserError: if another run has been started there in the meantime, or it can't be made.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if resume:
            _write_whole(run_dir / CONFIG_FILE, as_yaml(config))
        else:
            with (run_dir / CONFIG_FILE).open("x", encoding="utf-8") as file:
                file.write(as_yaml(config))
    except FileExistsError as error:
        raise UserError(f"run_dir={run_dir} holds another run; choose another one") from error
    except OSError as error:
        raise UserError(
            f"run_dir={run_dir} can't be created ({error.strerror}); choose another one"
        ) from error
    _write_whole(run_dir / PLAN_FILE, plan.to_json(indent=2) + "\n")


def as_yaml(config: Mapping[str, Any]) -> str:
    """A configuration as ``config.yaml`` holds it."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(config)))


def _write_whole(path: Path, text: str) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def wait_for(
    run_dir: Path, plan: Plan, timeout_s: float, config: Mapping[str, Any] | None = None
) -> None:
    """Wait until another process has created ``run_dir``, and compare its plan with ours.

    Args:
        config: if given, files of an earlier run may be there: wait until they are replaced by
            those of this configuration.

    Raises:
        UnevenTPError: if the files don't appear in time.
        UserError: if the processes were given different configurations.
    """
    end = time.monotonic() + timeout_s
    while not (run_dir / PLAN_FILE).exists() or not _is_of(run_dir, plan, config):
        if time.monotonic() > end:
            raise UnevenTPError(f"run_dir={run_dir} was not created by rank 0 within {timeout_s} s")
        time.sleep(_POLL_S)
    if read(run_dir)[1].digest != plan.digest:
        raise UserError(
            f"run_dir={run_dir} holds another plan than this process made; start all processes "
            "with the same overrides and choose a new run_dir"
        )


def _is_of(run_dir: Path, plan: Plan, config: Mapping[str, Any] | None) -> bool:
    if config is None:
        return True
    text = (run_dir / CONFIG_FILE).read_text(encoding="utf-8")
    return text == as_yaml(config) and read(run_dir)[1].digest == plan.digest


def read(run_dir: Path) -> tuple[dict[str, Any], Plan]:
    """Configuration and plan of the run in ``run_dir``.

    Raises:
        UserError: if a file is missing or damaged.
    """
    try:
        config = OmegaConf.to_container(OmegaConf.load(run_dir / CONFIG_FILE))
        plan_json = (run_dir / PLAN_FILE).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        raise UserError(f"run_dir={run_dir} holds no complete run: {error}") from error
    if not isinstance(config, dict):
        raise UserError(f"{run_dir / CONFIG_FILE} is not a mapping; start the run again")
    return {str(key): value for key, value in config.items()}, Plan.from_json(plan_json)
