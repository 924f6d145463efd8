"""Events -> a timeline: what the job was doing at every moment, and which steps were kept.

The wall time, from the first event to the last, is cut into :class:`Span` s that follow each
other without gap or overlap, in integer nanoseconds; so sums over them balance by construction.
Where events say nothing, a rule does:

* A step lasts from what was recorded before it (the previous step, the end of a save, ...) to
  its own end, so fetching of data counts.
* An attempt that ends without having finished was in the middle of a step, which is lost. From
  the moment of the failure (``detect_s`` before it was noticed) to the next attempt the job waits.
* A step is rolled back when a later attempt starts at it or before it; where none has followed a
  failure, when no durable checkpoint holds it.
* Time never runs backwards: an event dated before an earlier one counts as simultaneous.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nemo_uneven_tp.events import Event
from nemo_uneven_tp.goodput.timeline import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    NANOSECONDS,
    RUNNING,
    Activity,
    Attempt,
    Failure,
    Span,
    Step,
    Timeline,
)


def timeline_of(events: Sequence[Event]) -> Timeline:
    """Read the timeline off the events of one job, in the order they were written.

    Raises:
        ValueError: if there is no event.
    """
    if not events:
        raise ValueError("no events")
    builder = _Builder(events)
    for event in events:
        builder.take(event)
    return builder.finish()


class _Builder:
    """Walks over the events; ``cursor`` is where the timeline has been cut off so far."""

    def __init__(self, events: Sequence[Event]) -> None:
        start = _ns(events[0].t)
        self.line = Timeline(start, start)
        self.cursor = self.now = start
        self.phase = Activity.START_UP
        self.outer = Activity.START_UP  # the phase around a save or a validation
        self.kept: list[int] = []  # positions of the steps not rolled back, by number
        self.has_launcher = any(event.event == "attempt_start" for event in events)
        self.nominal: int | None = None
        self.out_of_service: frozenset[int] = frozenset()
        self.handlers: Mapping[str, Callable[[Event], None]] = {
            "job_start": self.job_start,
            "attempt_start": self.attempt_start,
            "plan_change": self.plan_change,
            "process_start": self.process_start,
            "load_start": lambda event: self.enter(Activity.LOAD),
            "load_end": lambda event: self.leave(Activity.LOAD),
            "train_start": self.train_start,
            "step": self.step,
            "save_start": lambda event: self.enter(Activity.SAVE),
            "save_end": lambda event: self.leave(Activity.SAVE),
            "save_complete": self.save_complete,
            "validation_start": lambda event: self.enter(Activity.EVALUATION),
            "validation_end": lambda event: self.leave(Activity.EVALUATION),
            "train_end": lambda event: self.end(FINISHED),
            "failure": self.failure,
            "stop_done": self.stop_done,
            "attempt_end": self.attempt_end,
            "job_end": self.job_end,
        }

    def take(self, event: Event) -> None:
        """Account for the time up to an event."""
        # Those of other ranks are dated back and may come from other clocks; they end nothing.
        if event.event != "process_start" or not self.has_launcher:
            self.now = max(self.now, _ns(event.t))
        handler = self.handlers.get(event.event)
        if handler is not None:
            handler(event)

    def finish(self) -> Timeline:
        """The timeline, up to the last event."""
        self.cut(Activity.OTHER if self.phase is Activity.STEP else self.phase)
        line = self.line
        line.end_ns = self.now
        if line.state in (FAILED, INTERRUPTED):
            trained = [a for a in line.attempts if a.first_step is not None]
            self.roll_back(trained[-1].newest_checkpoint if trained else 0)
        return line

    # --- cutting --------------------------------------------------------------------------

    def cut(self, activity: Activity, step: int | None = None, until: int | None = None) -> None:
        """End the stretch of time that began at the cursor."""
        end = self.now if until is None else max(self.cursor, min(until, self.now))
        if end > self.cursor:
            self.line.spans.append(Span(self.cursor, end, activity, step))
        self.cursor = end

    def between_steps(self) -> Activity:
        """What the time since the last cut was, if it was no step."""
        return Activity.OTHER if self.phase is Activity.STEP else self.phase

    def enter(self, phase: Activity) -> None:
        """Begin something that interrupts training or start-up."""
        self.cut(self.between_steps())
        if self.phase not in (Activity.LOAD, Activity.SAVE, Activity.EVALUATION):
            self.outer = self.phase  # else it is a save in the middle of a validation
        self.phase = phase

    def leave(self, phase: Activity) -> None:
        """End what :meth:`enter` began; its begin may have been lost."""
        if phase is Activity.LOAD and self.phase is phase and self.line.attempts:
            self.line.attempts[-1].load_ns += self.now - self.cursor
        self.cut(self.phase if self.phase is not Activity.STEP else phase)
        if self.phase is phase:
            self.phase = self.outer

    # --- launches -------------------------------------------------------------------------

    def job_start(self, event: Event) -> None:
        """The first one starts the job; later ones go on with it."""
        self.nominal = event.get("nominal_world_size", self.nominal)
        if self.line.attempts:
            self.wait()
        self.pay()

    def attempt_start(self, event: Event) -> None:
        """A launch; whatever ran before has ended."""
        if self.line.attempts:
            self.wait()
        else:
            self.cut(self.phase)
        self.phase = self.outer = Activity.START_UP
        self.line.state = RUNNING
        attempt = Attempt(self.now)
        self.line.attempts.append(attempt)
        self.out_of_service = frozenset(event.get("failed_ranks", ()))
        self.sizes(attempt, event)

    def plan_change(self, event: Event) -> None:
        """Failed ranks were found out at start: the plan of the launch was provisional."""
        if event.get("failed_ranks") is not None:
            self.out_of_service = frozenset(event.get("failed_ranks"))
        if self.line.attempts:
            attempt = self.line.attempts[-1]
            self.sizes(attempt, event)
            attempt.degrees = event.get("degrees_after", attempt.degrees)

    def process_start(self, event: Event) -> None:
        """Where there is no launcher, the first process of an attempt starts it."""
        if self.has_launcher:
            return
        attempts = self.line.attempts
        if not attempts or attempts[-1].train_start_ns is not None:
            self.attempt_start(event)

    def sizes(self, attempt: Attempt, event: Event) -> None:
        """Take over what an event says about the layout."""
        if event.get("degrees") is not None:
            attempt.degrees = event.get("degrees")
        attempt.world_size = event.get("world_size", attempt.world_size)
        self.nominal = event.get("nominal_world_size", self.nominal)
        attempt.nominal_world_size = self.nominal
        attempt.out_of_service = self.out_of_service
        self.pay()

    def pay(self) -> None:
        """Note from when on how many GPUs are paid for."""
        if self.nominal is None:
            return
        line = self.line
        paid = max(0, self.nominal - len(self.out_of_service))
        if not line.paid:
            line.paid_since_ns.append(line.start_ns)
            line.paid.append(paid)
        elif line.paid[-1] != paid:
            line.paid_since_ns.append(self.now)
            line.paid.append(paid)

    def wait(self) -> None:
        """Nothing has been running since the cursor, or nobody knows for how long it did."""
        running = self.phase not in (Activity.WAITING, Activity.OTHER)
        if running and self.line.attempts and self.line.attempts[-1].outcome is RUNNING:
            self.line.attempts[-1].outcome = FAILED
        self.cut(Activity.WAITING)
        self.phase = Activity.WAITING

    # --- training -------------------------------------------------------------------------

    def train_start(self, event: Event) -> None:
        """Training begins, or begins again at an earlier step."""
        attempts = self.line.attempts
        if not attempts or attempts[-1].train_start_ns is not None:
            self.attempt_start(event)
        self.cut(self.phase)
        self.phase = self.outer = Activity.STEP
        attempt = attempts[-1]
        attempt.train_start_ns = self.now
        attempt.first_step = attempt.newest_checkpoint = event.get("step")
        self.sizes(attempt, event)
        self.roll_back(event.get("step"))

    def step(self, event: Event) -> None:
        """A step has ended."""
        if not self.line.attempts:
            self.attempt_start(event)
        attempt = self.line.attempts[-1]
        number = event.get("step")
        expected = attempt.first_step if attempt.last_number is None else attempt.last_number + 1
        if self.phase is not Activity.STEP or number != expected:
            # Lines are missing: what came before the step itself is not a part of it.
            length = round(event.get("duration_s", 0.0) * NANOSECONDS)
            self.cut(self.between_steps(), until=self.now - length)
        if self.phase is not Activity.WAITING:  # else written before the failure ended it
            self.phase = self.outer = Activity.STEP
        self.roll_back(number)
        position = len(self.line.steps)
        self.line.steps.append(
            Step(
                number,
                max(0, event.get("tokens")),
                self.cursor,
                self.now,
                len(self.line.attempts) - 1,
                attempt.last_number is None,
            )
        )
        self.kept.append(position)
        self.cut(Activity.STEP, position)
        attempt.last_number = number
        if attempt.first_step is None:
            attempt.first_step = number
            attempt.newest_checkpoint = max(attempt.newest_checkpoint, number)
        if attempt.first_step_end_ns is None:
            attempt.first_step_end_ns = self.now

    def save_complete(self, event: Event) -> None:
        """A checkpoint is durable."""
        if self.line.attempts:
            attempt = self.line.attempts[-1]
            attempt.newest_checkpoint = max(attempt.newest_checkpoint, event.get("step"))

    def roll_back(self, number: int) -> None:
        """Steps from ``number`` on are trained again, or would have to be."""
        while self.kept and self.line.steps[self.kept[-1]].number >= number:
            self.line.steps[self.kept.pop()].kept = False

    # --- ends -----------------------------------------------------------------------------

    def end(self, outcome: str) -> None:
        """An attempt has come to its end, for better or worse."""
        if self.phase is Activity.STEP and outcome is not FINISHED:
            self.cut(Activity.UNFINISHED_STEP)
        else:
            self.cut(self.between_steps())
        if self.phase is not Activity.WAITING:
            self.phase = self.outer = Activity.OTHER if outcome is FINISHED else Activity.WAITING
        if self.line.attempts and self.line.attempts[-1].outcome is RUNNING:
            self.line.attempts[-1].outcome = outcome
        self.line.state = outcome

    def failure(self, event: Event) -> None:
        """A failure has been noticed, ``detect_s`` after it happened."""
        detect_s = event.get("detect_s")
        happened = self.now - round(max(0.0, detect_s or 0.0) * NANOSECONDS)
        activity = Activity.UNFINISHED_STEP if self.phase is Activity.STEP else self.phase
        self.cut(activity, until=happened)
        self.cut(Activity.WAITING)
        self.phase = self.outer = Activity.WAITING
        attempts = self.line.attempts
        step = None
        if attempts:
            attempts[-1].outcome = self.line.state = FAILED
            last = attempts[-1].last_number
            step = attempts[-1].first_step if last is None else last + 1
        ranks = tuple(event.get("ranks", ()))
        self.line.failures.append(
            Failure(
                self.now, ranks, event.get("kind", "unknown"), step, detect_s, len(attempts) - 1
            )
        )
        self.out_of_service |= set(ranks)
        self.pay()

    def stop_done(self, event: Event) -> None:
        """All processes of the failed attempt are gone."""
        for failure in self.line.failures:
            if failure.attempt == len(self.line.attempts) - 1 and failure.stop_ns is None:
                failure.stop_ns = self.now

    def attempt_end(self, event: Event) -> None:
        """The launcher has seen all processes end."""
        self.end(_outcome(event.get("reason")))

    def job_end(self, event: Event) -> None:
        """The launcher leaves."""
        self.end(_outcome(event.get("reason")))


def _outcome(reason: str | None) -> str:
    return {"finished": FINISHED, "interrupted": INTERRUPTED}.get(reason or "", FAILED)


def _ns(t: float) -> int:
    return round(t * NANOSECONDS)
