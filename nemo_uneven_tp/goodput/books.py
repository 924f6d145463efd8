"""The books of a job: wall time = kept steps + badput, and the goodputs (definitions).

* **kept**: the time that the steps whose result was kept would have taken at full size.
* **badput**, by class: ``start_up``, ``checkpoint_load``, ``checkpoint_save`` (the part that
  blocks), ``lost_steps`` (finished and rolled back, or unfinished), ``reduced_size`` (what kept
  steps took beyond that, because GPUs were missing), ``waiting`` (nothing was running),
  ``evaluation``, ``other``. kept + badput = wall, exactly.
* **time goodput** = (kept + reduced_size) / wall: time in steps whose result was kept.
* **token goodput** = tokens kept / tokens the undamaged job would have trained in that wall time.
* **GPU goodput** = tokens kept / tokens the undamaged job would have trained in the GPU time paid.

The undamaged job's speed is the median over the steps of attempts at full size, the first step
of each left out (it warms up), of this job or, if it had none, of the run it is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from nemo_uneven_tp.goodput.timeline import NANOSECONDS, Activity, Failure, Span, Step, Timeline

KEPT = "kept"
BADPUT = (
    "start_up",
    "checkpoint_load",
    "checkpoint_save",
    "lost_steps",
    "reduced_size",
    "waiting",
    "evaluation",
    "other",
)
"""Badput classes, in the order of tables and figures."""

OWN = "this run"


@dataclass(frozen=True)
class Speed:
    """How fast the undamaged job trains. ``source`` says which run it was measured in."""

    ns_per_token: float
    source: str
    steps: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second."""
        return NANOSECONDS / self.ns_per_token


@dataclass(frozen=True)
class Books:
    """The books; times in integer nanoseconds. Goodputs are ``None`` where they can't be told."""

    wall_ns: int
    kept_ns: int
    badput_ns: dict[str, int]
    steps_kept: int
    steps_lost: int
    tokens_kept: int
    tokens_lost: int
    gpu_ns_paid: int | None
    speed: Speed | None
    time_goodput: float
    token_goodput: float | None
    gpu_goodput: float | None


def undamaged_speed(line: Timeline, source: str = OWN) -> Speed | None:
    """The undamaged job's speed as measured in ``line``, ``None`` if it never ran at full size."""
    full = [s for s in line.steps if s.tokens > 0 and line.attempts[s.attempt].is_full_size]
    steps = [step for step in full if not step.first] or full
    if not steps:
        return None
    ns_per_token = median(step.length_ns / step.tokens for step in steps)
    return Speed(ns_per_token, source, len(steps)) if ns_per_token > 0 else None


def books_of(line: Timeline, baseline: Speed | None = None) -> Books:
    """Do the books of one job.

    Args:
        baseline: speed of the undamaged job, for a job that never ran at full size.
    """
    speed = undamaged_speed(line) or baseline
    times = dict.fromkeys((KEPT, *BADPUT), 0)
    for span in line.spans:
        times[class_of(line, span)] += span.length_ns
    times["reduced_size"] = reduced_size_ns(line, speed)
    times[KEPT] -= times["reduced_size"]
    kept = [step for step in line.steps if step.kept]
    tokens = sum(step.tokens for step in kept)
    paid = gpu_ns_paid(line)
    wall = line.wall_ns
    token_goodput = gpu_goodput = None
    if speed is not None and wall:
        token_goodput = tokens * speed.ns_per_token / wall
        nominal = next((a.nominal_world_size for a in line.attempts if a.nominal_world_size), None)
        if paid and nominal:
            gpu_goodput = tokens * speed.ns_per_token * nominal / paid
    kept_ns = times.pop(KEPT)
    return Books(
        wall_ns=wall,
        kept_ns=kept_ns,
        badput_ns=times,
        steps_kept=len(kept),
        steps_lost=len(line.steps) - len(kept),
        tokens_kept=tokens,
        tokens_lost=sum(step.tokens for step in line.steps) - tokens,
        gpu_ns_paid=paid,
        speed=speed,
        time_goodput=(kept_ns + times["reduced_size"]) / wall if wall else 0.0,
        token_goodput=token_goodput,
        gpu_goodput=gpu_goodput,
    )


def class_of(line: Timeline, span: Span) -> str:
    """``kept`` or the badput class of a stretch of time, reduced size left aside."""
    if span.step is not None:
        return KEPT if line.steps[span.step].kept else "lost_steps"
    return "lost_steps" if span.activity is Activity.UNFINISHED_STEP else str(span.activity)


def reduced_size_ns(line: Timeline, speed: Speed | None) -> int:
    """What the kept steps at reduced size took beyond what the undamaged job needs for them.

    Their sum counts, so the noise of single steps cancels; first steps, which warm up, do not.
    0 where the undamaged speed is not known.
    """
    if speed is None:
        return 0
    reduced = [s for s in line.steps if s.kept and is_reduced(line, s) and not s.first]
    took = sum(step.length_ns for step in reduced)
    needed = round(sum(step.tokens for step in reduced) * speed.ns_per_token)
    return max(0, took - needed)


def is_reduced(line: Timeline, step: Step) -> bool:
    """Whether a step was made with fewer GPUs than the job has."""
    return not line.attempts[step.attempt].is_full_size


def gpu_ns_paid(line: Timeline) -> int | None:
    """GPUs times nanoseconds that are paid for; ``None`` if their number is not known.

    A GPU is paid for while the job holds it: from job start on, until it is known to have
    failed, and again from the attempt on that uses it again.
    """
    if not line.paid:
        return None
    ends = [*line.paid_since_ns[1:], line.end_ns]
    return sum(
        count * (end - since)
        for count, since, end in zip(line.paid, line.paid_since_ns, ends, strict=True)
    )


def failures_of(line: Timeline) -> list[dict[str, Any]]:
    """Each failed rank with the times of the way back, in seconds; ``None``: not known."""
    return [row for failure in line.failures for row in _rows(line, failure)]


def _rows(line: Timeline, failure: Failure) -> list[dict[str, Any]]:
    after = failure.attempt + 1
    attempt = line.attempts[after] if after < len(line.attempts) else None
    stop_s = wait_s = start_s = load_s = first_step_s = degrees = None
    if failure.stop_ns is not None:
        stop_s = _s(failure.stop_ns - failure.t_ns)
    if attempt is not None:
        wait_s = _s(attempt.start_ns - (failure.stop_ns or failure.t_ns))
        degrees = attempt.degrees
        if attempt.train_start_ns is not None:
            load_s = _s(attempt.load_ns)
            start_s = _s(attempt.train_start_ns - attempt.start_ns - attempt.load_ns)
            if attempt.first_step_end_ns is not None:
                first_step_s = _s(attempt.first_step_end_ns - attempt.train_start_ns)
    return [
        {
            "rank": rank,
            "kind": failure.kind,
            "step": failure.step,
            "t_s": _s(failure.t_ns - line.start_ns),
            "detect_s": failure.detect_s,
            "stop_s": stop_s,
            "wait_s": wait_s,
            "start_s": start_s,
            "load_s": load_s,
            "first_step_s": first_step_s,
            "degrees_after": degrees,
        }
        for rank in failure.ranks or (None,)
    ]


def _s(ns: int) -> float:
    return ns / NANOSECONDS
