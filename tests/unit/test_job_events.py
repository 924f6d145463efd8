"""What a launcher records around a launch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_uneven_tp import events, job_events
from nemo_uneven_tp.cli.pretrain import Run, prepare
from nemo_uneven_tp.events import ATTEMPT_VARIABLE, EVENTS_FILE


class FailedError(Exception):
    def __init__(self, rank: int | None, exit_code: int | None) -> None:
        self.rank = rank
        self.exit_code = exit_code


def prepared(folder: Path, *overrides: str) -> Run:
    run = prepare("test", [f"run_dir={folder}", f"data.paths=[{__file__}]", *overrides])
    assert run is not None
    return run


def told(run: Run) -> list[tuple[str, dict[str, object]]]:
    return [
        (event.event, {k: v for k, v in event.fields.items() if v is not None})
        for event in events.read(run.run_dir / EVENTS_FILE).events
        if event.event not in ("job_start", "attempt_start")
    ]


def test_a_run_that_finishes(tmp_path: Path) -> None:
    run = prepared(tmp_path, "uneven_tp.failed_ranks=[3]")
    with job_events.recorded(run.run_dir, run.config, run.plan, started=5.0):
        assert os.environ[ATTEMPT_VARIABLE] == "0"
    assert ATTEMPT_VARIABLE not in os.environ
    job, attempt, *_ = events.read(tmp_path / EVENTS_FILE).events
    assert (job.t, job.get("name"), job.get("max_steps")) == (5.0, "gpt_tiny_cpu", 50)
    assert (job.get("tokens_per_step"), job.get("nominal_world_size")) == (12 * 256, 4)
    assert (attempt.get("degrees"), attempt.get("world_size")) == ([2, 1], 3)
    assert (attempt.get("failed_ranks"), attempt.get("plan")) == ([3], run.plan.digest)
    assert told(run) == [
        ("attempt_end", {"reason": "finished"}), ("job_end", {"reason": "finished"})
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "failure", "reason"),
    [
        (FailedError(2, -9), {"ranks": [2], "kind": "killed", "signal": 9}, "failure"),
        (FailedError(2, 1), {"ranks": [2], "kind": "exit", "exit_code": 1}, "failure"),
        (FailedError(None, None), None, "interrupted"),
        (KeyboardInterrupt(), None, "interrupted"),
        (ValueError(), None, "failure"),
    ],
)
def test_a_run_that_does_not(
    tmp_path: Path, error: BaseException, failure: dict[str, object] | None, reason: str
) -> None:
    run = prepared(tmp_path)
    with (
        pytest.raises(type(error)),
        job_events.recorded(run.run_dir, run.config, run.plan),
    ):
        raise error
    ends = [("attempt_end", {"reason": reason}), ("job_end", {"reason": reason})]
    assert told(run) == ([("failure", failure)] if failure else []) + ends


def test_launches_are_counted(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    for attempt in range(3):
        with job_events.recorded(run.run_dir, run.config, run.plan):
            assert os.environ[ATTEMPT_VARIABLE] == str(attempt)
    found = events.read(tmp_path / EVENTS_FILE).events
    assert [e.attempt for e in found if e.event == "attempt_start"] == [0, 1, 2]


def test_the_fingerprint_tells_jobs_apart(tmp_path: Path) -> None:
    def of(*overrides: str) -> dict[str, object]:
        run = prepared(tmp_path / "run", *overrides)
        return job_events.fingerprint(run.config, run.plan)

    plain = of()
    same = (
        ["uneven_tp.failed_ranks=[3]"],
        ["uneven_tp=off"],
        ["data.micro_batch_size=1"],
        ["trainer.max_steps=3"],
    )
    assert all(of(*overrides) == plain for overrides in same)
    other = (
        ["model.num_layers=2"],
        ["data.global_batch_size=24"],
        ["model.seq_length=128"],
        ["data.seed=7"],
    )
    assert all(of(*overrides) != plain for overrides in other)


def test_the_digest_is_of_the_text_and_not_of_its_place(tmp_path: Path) -> None:
    digests = []
    for folder, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text").write_text(text)
        digests.append(job_events.text_digest([tmp_path / folder / "text"]))
    assert digests[0] == digests[1] != digests[2]
