"""``events.jsonl``: what a job did and when, appended by its processes over all its restarts.

One JSON object a line, each appended by one ``write`` to a file opened with ``O_APPEND``, so
lines of several processes never mix. A process killed in the middle of a write leaves a line
without its end; whoever writes next ends it first, so a killed writer spoils its own last line
and no other. Readers skip damaged lines, and count and name them.

Every line has ``t`` (``time.time()``, seconds), ``event``, ``attempt`` (0, 1, ...: launches
within the job), ``rank`` (nominal; ``null`` for a launcher or supervisor), ``host`` and ``pid``.
:data:`FIELDS` says what else the known events carry.
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
ATTEMPT_VARIABLE = "UNEVEN_TP_ATTEMPT"
"""Environment variable by which a launcher tells its processes which launch they are of."""

logger = logging.getLogger(__name__)

_INTEGER, _NUMBER, _TEXT, _OBJECT = "integer", "number", "text", "object"
_INTEGERS = "list of integers"
_DEGREES = "list of degrees"  # per replica; with pipeline stages a list for each replica

FIELDS: Mapping[str, Mapping[str, str]] = {
    # launcher or supervisor
    "job_start": {
        "name": _TEXT,
        "policy": _TEXT,
        "nominal_world_size": _INTEGER,
        "tokens_per_step": _INTEGER,
        "fingerprint": _OBJECT,
        "max_steps": _INTEGER,
    },
    "attempt_start": {
        "degrees": _DEGREES,
        "world_size": _INTEGER,
        "nominal_world_size": _INTEGER,
        "failed_ranks": _INTEGERS,
        "plan": _TEXT,
        "policy": _TEXT,
    },
    "failure": {
        "ranks": _INTEGERS,
        "kind": _TEXT,
        "signal": _INTEGER,
        "exit_code": _INTEGER,
        "detect_s": _NUMBER,
    },
    "stop_done": {},
    "wait_start": {},
    "wait_end": {},
    "plan_change": {
        "degrees_before": _DEGREES,
        "degrees_after": _DEGREES,
        "degrees": _DEGREES,  # the same as degrees_after
        "world_size": _INTEGER,
        "nominal_world_size": _INTEGER,
        "failed_ranks": _INTEGERS,
        "plan": _TEXT,
        "reason": _TEXT,
    },
    "attempt_end": {"reason": _TEXT},
    "job_end": {"reason": _TEXT},
    # every rank
    "process_start": {},
    # rank 0 of the living
    "imports_done": {},
    "groups_done": {},
    "load_start": {"step": _INTEGER, "path": _TEXT},
    "load_end": {"step": _INTEGER, "path": _TEXT},
    "train_start": {
        "step": _INTEGER,
        "degrees": _DEGREES,
        "world_size": _INTEGER,
        "nominal_world_size": _INTEGER,
        "tokens_per_step": _INTEGER,
        "fingerprint": _OBJECT,
    },
    "step": {"step": _INTEGER, "tokens": _INTEGER, "duration_s": _NUMBER},
    "save_start": {"step": _INTEGER},
    "save_end": {"step": _INTEGER, "duration_s": _NUMBER},
    "save_complete": {"step": _INTEGER},
    "validation_start": {"step": _INTEGER},
    "validation_end": {"step": _INTEGER},
    "train_end": {"step": _INTEGER},
}
"""Fields of the known events. Each may be ``null`` or missing, but those in :data:`NEEDED`."""

NEEDED: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "tokens"),
    "train_start": ("step",),
    "save_complete": ("step",),
}


@dataclass(frozen=True, slots=True)
class Event:
    """One line. ``fields`` holds what is not in every line; ``line`` counts from 1."""

    t: float
    event: str
    attempt: int
    rank: int | None
    host: str
    pid: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0

    def get(self, name: str, default: Any = None) -> Any:
        """A field, or ``default`` where it is missing or ``null``."""
        value = self.fields.get(name)
        return default if value is None else value


@dataclass(frozen=True, slots=True)
class DamagedLine:
    """A line that is no event, and why."""

    line: int
    reason: str


@dataclass(frozen=True)
class History:
    """The events of a file in the order they were written, and the lines that are none."""

    events: tuple[Event, ...]
    damaged: tuple[DamagedLine, ...] = ()


class EventWriter:
    """Appends events of one process. Never raises: a full disk must not end a training run that
    would go on without its events; one warning is logged instead.

    Args:
        path: the file; made if it is not there.
        attempt: the launch this process belongs to.
        rank: nominal rank; ``None`` for a launcher or supervisor.
    """

    def __init__(self, path: Path, *, attempt: int = 0, rank: int | None = None) -> None:
        self.path = path
        self.attempt = attempt
        self.rank = rank
        self._host = socket.gethostname()
        self._failed = False
        self._file: int | None = None
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            self._end_torn_line(self._file)
        except OSError as error:
            self._check(False, error.strerror or str(error))

    def write(self, event: str, *, t: float | None = None, **fields: Any) -> None:
        """Append one event; ``t`` defaults to now."""
        if self._file is None:
            return
        line = {
            "t": round(time.time() if t is None else t, 6),
            "event": event,
            "attempt": self.attempt,
            "rank": self.rank,
            "host": self._host,
            "pid": os.getpid(),
            **fields,
        }
        try:
            # A launcher outlives its workers, one of which may be killed while it writes.
            if self._failed or self.rank is None:
                self._end_torn_line(self._file)
            data = (json.dumps(line, separators=(",", ":"), default=str) + "\n").encode()
            self._check(os.write(self._file, data) == len(data), "the disk is full")
        except OSError as error:
            self._check(False, error.strerror or str(error))

    def close(self) -> None:
        """Close the file; later writes do nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, good: bool, reason: str) -> None:
        if not good and not self._failed:
            logger.warning("%s can't be written to (%s); events are missing", self.path, reason)
        self._failed = not good

    @staticmethod
    def _end_torn_line(file: int) -> None:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            os.write(file, b"\n")


def read(path: Path) -> History:
    """All events of a file; damaged lines are told apart.

    Raises:
        OSError: if the file can't be read.
    """
    events: list[Event] = []
    damaged: list[DamagedLine] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue  # two writers may both have ended the same torn line
        found = _parse(line, number)
        if isinstance(found, Event):
            events.append(found)
        else:
            damaged.append(DamagedLine(number, found))
    return History(tuple(events), tuple(damaged))


def _parse(line: bytes, number: int) -> Event | str:
    """The event of a line, or what is wrong with it."""
    try:
        values = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "not UTF-8 text"
    except (ValueError, RecursionError):
        return "not a JSON object"
    if not isinstance(values, dict):
        return "not a JSON object"
    t, event = values.pop("t", None), values.pop("event", None)
    if not _is(t, _NUMBER) or not math.isfinite(t) or not 0 <= t < 2**33:
        return "no time t"
    if not isinstance(event, str):
        return "no event name"
    common = {name: values.pop(name, None) for name in ("attempt", "rank", "host", "pid")}
    for name, kind in (("attempt", _INTEGER), ("rank", _INTEGER), ("host", _TEXT)):
        if common[name] is not None and not _is(common[name], kind):
            return f"{name} is no {kind}"
    for name, kind in FIELDS.get(event, {}).items():
        if values.get(name) is not None and not _is(values[name], kind):
            return f"{name} of {event} is no {kind}"
    for name in NEEDED.get(event, ()):
        if values.get(name) is None:
            return f"{event} has no {name}"
    pid = common["pid"] if _is(common["pid"], _INTEGER) else 0
    attempt, rank, host = common["attempt"] or 0, common["rank"], common["host"] or ""
    return Event(float(t), event, attempt, rank, host, pid, values, number)


def _is(value: Any, kind: str) -> bool:
    if kind == _INTEGER:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == _NUMBER:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == _TEXT:
        return isinstance(value, str)
    if kind == _INTEGERS:
        return isinstance(value, list) and all(_is(item, _INTEGER) for item in value)
    if kind == _DEGREES:
        return isinstance(value, list) and all(
            _is(item, _INTEGER) or _is(item, _INTEGERS) for item in value
        )
    return isinstance(value, dict)


def next_attempt(path: Path) -> int:
    """The number of the launch that is about to begin: one more than any in the file."""
    try:
        return max((event.attempt + 1 for event in read(path).events), default=0)
    except OSError:
        return 0


def attempt_of_environment() -> int:
    """The launch this process belongs to, as its launcher has said; 0 if none has."""
    text = os.environ.get(ATTEMPT_VARIABLE, "")
    return int(text) if text.isdecimal() else 0


def process_started_at() -> float:
    """When this process was started, as ``time.time()``: before the interpreter and its imports.

    From ``/proc``, to 10 ms; where there is none, now.
    """
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        # Field 22; the name in field 2 may hold spaces and brackets.
        ticks = int(stat.rpartition(")")[2].split()[19])
        since_boot = ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time()
