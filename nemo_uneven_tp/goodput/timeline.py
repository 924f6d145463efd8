"""A job's timeline: what it was doing at every moment, and which steps were kept.

:mod:`nemo_uneven_tp.goodput.reading` reads it off events. Times are integer nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

NANOSECONDS = 1_000_000_000
FINISHED, FAILED, INTERRUPTED, RUNNING = "finished", "failed", "interrupted", "running"


class Activity(StrEnum):
    """What the job was doing."""

    START_UP = "start_up"
    LOAD = "checkpoint_load"
    SAVE = "checkpoint_save"
    STEP = "step"
    UNFINISHED_STEP = "unfinished_step"
    WAITING = "waiting"
    EVALUATION = "evaluation"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time; ``step`` is the position in :attr:`Timeline.steps` of a finished step."""

    start_ns: int
    end_ns: int
    activity: Activity
    step: int | None = None

    @property
    def length_ns(self) -> int:
        """How long it took."""
        return self.end_ns - self.start_ns


@dataclass(slots=True)
class Step:
    """A finished training step. ``number`` counts from 0; ``first``: the first of its attempt."""

    number: int
    tokens: int
    start_ns: int
    end_ns: int
    attempt: int
    first: bool
    kept: bool = True

    @property
    def length_ns(self) -> int:
        """How long it took, fetching of data included."""
        return self.end_ns - self.start_ns


@dataclass(slots=True)
class Attempt:
    """One launch. Sizes are ``None`` where no event has told them."""

    start_ns: int
    degrees: list[Any] | None = None
    world_size: int | None = None
    nominal_world_size: int | None = None
    out_of_service: frozenset[int] = frozenset()
    train_start_ns: int | None = None
    first_step: int | None = None
    first_step_end_ns: int | None = None
    load_ns: int = 0
    newest_checkpoint: int = 0
    last_number: int | None = None
    outcome: str = RUNNING

    @property
    def is_full_size(self) -> bool:
        """Whether no rank is missing, as far as is known."""
        return self.world_size is None or self.world_size == self.nominal_world_size


@dataclass(slots=True)
class Failure:
    """A failure as it was reported; ``attempt`` is the position of the attempt it ended."""

    t_ns: int
    ranks: tuple[int, ...]
    kind: str
    step: int | None
    detect_s: float | None
    attempt: int
    stop_ns: int | None = None


@dataclass
class Timeline:
    """The whole job. ``paid[i]`` GPUs are paid for from ``paid_since_ns[i]`` on."""

    start_ns: int
    end_ns: int
    spans: list[Span] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    paid_since_ns: list[int] = field(default_factory=list)
    paid: list[int] = field(default_factory=list)
    state: str = RUNNING

    @property
    def wall_ns(self) -> int:
        """From job start to the last event."""
        return self.end_ns - self.start_ns
