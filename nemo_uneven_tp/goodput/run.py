"""One run's goodput, from the files in its ``run_dir``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_uneven_tp import events
from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.goodput.books import Books, Speed, books_of, failures_of, undamaged_speed
from nemo_uneven_tp.goodput.reading import timeline_of
from nemo_uneven_tp.goodput.timeline import NANOSECONDS, Timeline

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class GoodputRun:
    """A run as its files tell it. ``losses`` by step number; later lines of a step count."""

    path: Path
    name: str
    policy: str | None
    max_steps: int | None
    fingerprint: Mapping[str, Any]
    line: Timeline
    losses: Mapping[int, float]
    damaged: tuple[tuple[str, events.DamagedLine], ...] = field(default=())

    def speed(self, source: str) -> Speed | None:
        """The undamaged job's speed as measured in this run."""
        return undamaged_speed(self.line, source)


def read_run(path: Path) -> GoodputRun:
    """Read a run directory (or its ``events.jsonl``).

    Raises:
        UserError: if it holds no readable events.
    """
    file = path / events.EVENTS_FILE if path.is_dir() or not path.suffix else path
    try:
        history = events.read(file)
    except OSError as error:
        raise UserError(
            f"{path} can't be reported on: {file} can't be read ({error.strerror}); give the "
            "run_dir of a run that wrote events.jsonl"
        ) from error
    if not history.events:
        why = f"all of its {len(history.damaged)} lines are damaged" if history.damaged else "empty"
        raise UserError(
            f"{path} can't be reported on: {file} holds no event ({why}); give the run_dir of a "
            "run that wrote events.jsonl"
        )
    job: dict[str, Any] = {}
    fingerprint: dict[str, Any] = {}
    for event in history.events:
        if event.event in ("job_start", "train_start"):
            fingerprint = {**event.get("fingerprint", {}), **fingerprint}
        if event.event in ("job_start", "attempt_start"):
            job.update({k: v for k, v in event.fields.items() if v is not None})
    losses, damaged_metrics = _losses(file.parent / METRICS_FILE)
    damaged = [(file.name, line) for line in history.damaged]
    return GoodputRun(
        path=file.parent,
        name=file.parent.resolve().name,
        policy=job.get("policy"),
        max_steps=job.get("max_steps"),
        fingerprint=fingerprint,
        line=timeline_of(history.events),
        losses=losses,
        damaged=(*damaged, *((METRICS_FILE, line) for line in damaged_metrics)),
    )


def report(run: GoodputRun, baseline: Speed | None = None) -> dict[str, Any]:
    """The books as plain data, with the names that ``--json`` promises; times in seconds."""
    books = books_of(run.line, baseline)
    return {
        "run": run.name,
        "path": str(run.path),
        "policy": run.policy,
        "state": run.line.state,
        **_numbers(books),
        "attempts": len(run.line.attempts),
        "failures": failures_of(run.line),
        "damaged_lines": [
            {"file": name, "line": line.line, "reason": line.reason} for name, line in run.damaged
        ],
    }


def _numbers(books: Books) -> dict[str, Any]:
    reduced = books.badput_ns["reduced_size"]
    speed = books.speed
    return {
        "wall_s": books.wall_ns / NANOSECONDS,
        "kept_s": books.kept_ns / NANOSECONDS,
        "kept_steps_s": (books.kept_ns + reduced) / NANOSECONDS,
        "badput_s": {name: ns / NANOSECONDS for name, ns in books.badput_ns.items()},
        "steps_kept": books.steps_kept,
        "steps_lost": books.steps_lost,
        "tokens_kept": books.tokens_kept,
        "tokens_lost": books.tokens_lost,
        "time_goodput": books.time_goodput,
        "token_goodput": books.token_goodput,
        "gpu_goodput": books.gpu_goodput,
        "gpu_s_paid": None if books.gpu_ns_paid is None else books.gpu_ns_paid / NANOSECONDS,
        "undamaged_tokens_per_s": None if speed is None else speed.tokens_per_s,
        "undamaged_speed_from": None if speed is None else f"{speed.steps} steps of {speed.source}",
    }


def _losses(path: Path) -> tuple[dict[int, float], list[events.DamagedLine]]:
    """Loss by step. A step trained again after a rollback has several lines; the last counts."""
    losses: dict[int, float] = {}
    damaged: list[events.DamagedLine] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return {}, []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line.decode("utf-8"))
            step, loss = values["step"], float(values["loss"])
            if not isinstance(step, int) or not math.isfinite(loss):
                raise ValueError("no finite loss")
            losses[step] = loss
        except (ValueError, LookupError, TypeError, RecursionError):
            damaged.append(events.DamagedLine(number, "no step with a finite loss"))
    return losses, damaged
