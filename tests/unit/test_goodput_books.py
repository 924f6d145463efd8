"""Goodput books: a worked example for every class, and balance over random event logs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.goodput.books import BADPUT
from nemo_uneven_tp.goodput.compare import compare
from nemo_uneven_tp.goodput.run import read_run, report

FINGERPRINT = {"model": {"hidden_size": 64}, "batch": {"global_batch_size": 8}, "data": {"seed": 1}}
NAMES = {
    "wall_s", "steps_kept", "steps_lost", "tokens_kept", "time_goodput", "token_goodput",
    "gpu_goodput", "badput_s", "failures",
}  # fmt: skip
FAILURE_NAMES = {
    "rank", "kind", "step", "detect_s", "stop_s", "start_s", "load_s", "first_step_s",
    "degrees_after",
}  # fmt: skip


class Log:
    """Lines of an ``events.jsonl``, at times counted from the job's start."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, t: float, event: str, **fields: Any) -> None:
        line = {"t": round(1.7e9 + t, 6), "event": event, "attempt": 0, "rank": None, **fields}
        self.lines.append(json.dumps(line) + "\n")

    def launch(self, t: float, failed: list[int], world: int, degrees: list[int]) -> None:
        self.add(
            t, "attempt_start", failed_ranks=failed, world_size=world, nominal_world_size=4,
            degrees=degrees,
        )  # fmt: skip

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "events.jsonl").write_text("".join(self.lines))
        return folder


def worked_example(plan_changes: bool = False) -> Log:
    """4 GPUs, 100 tokens a step; rank 3 dies at 22 s; steps take 2 s, and 3 s on 3 GPUs."""
    log = Log()
    log.add(0, "job_start", nominal_world_size=4, fingerprint=FINGERPRINT)
    log.launch(0, [], 4, [2, 2])
    log.add(5, "train_start", step=0)  # start-up 5
    for i in range(4):
        log.add(7 + 2 * i, "step", step=i, tokens=100)  # to 13; step 3 will be lost
    log.add(13, "save_start", step=3)
    log.add(14, "save_end", step=3)  # save 1
    log.add(14, "save_complete", step=3)
    log.add(14, "validation_start")
    log.add(17, "validation_end")  # evaluation 3
    log.add(19, "step", step=4, tokens=100)  # lost 2
    log.add(23, "failure", ranks=[3], kind="killed", detect_s=1.0)  # unfinished 3, then waiting
    log.add(24, "stop_done")
    log.launch(27, [] if plan_changes else [3], 4 if plan_changes else 3, [2, 2])  # waiting 5
    if plan_changes:
        log.add(28, "plan_change", failed_ranks=[3], world_size=3, degrees_after=[2, 1])
    log.add(30, "load_start", step=3)  # start-up 3
    log.add(32, "load_end", step=3)  # load 2
    log.add(33, "train_start", step=3)  # start-up 1; the fourth step is rolled back
    for i in range(3):
        log.add(36 + 3 * i, "step", step=3 + i, tokens=100)
    log.add(42, "train_end", step=6)
    log.add(44, "attempt_end", reason="finished")  # other 2
    return log


def test_worked_example(tmp_path: Path) -> None:
    found = report(read_run(worked_example().write(tmp_path)))
    assert found.keys() >= NAMES
    assert found["wall_s"] == 44
    assert (found["steps_kept"], found["steps_lost"], found["tokens_kept"]) == (6, 2, 600)
    # The first step of the second attempt warms up: 2 of its 3 kept steps are 1 s longer.
    assert found["badput_s"] == {
        "start_up": 9,
        "checkpoint_load": 2,
        "checkpoint_save": 1,
        "lost_steps": 7,
        "reduced_size": 2,
        "waiting": 5,
        "evaluation": 3,
        "other": 2,
    }
    assert found["kept_s"] == 13
    assert found["time_goodput"] == pytest.approx(15 / 44)
    assert found["token_goodput"] == pytest.approx(600 / (50 * 44))
    paid = 4 * 23 + 3 * 21  # the dead GPU is paid for until its failure is noticed
    assert found["gpu_goodput"] == pytest.approx(600 / 50 * 4 / paid)
    (failure,) = found["failures"]
    assert failure.keys() >= FAILURE_NAMES
    assert {name: failure[name] for name in FAILURE_NAMES} == {
        "rank": 3, "kind": "killed", "step": 5, "detect_s": 1.0, "stop_s": 1.0, "start_s": 4.0,
        "load_s": 2.0, "first_step_s": 3.0, "degrees_after": [2, 2],
    }  # fmt: skip


def test_plan_change_overrides_the_provisional_plan(tmp_path: Path) -> None:
    found = report(read_run(worked_example(plan_changes=True).write(tmp_path)))
    assert found["badput_s"]["reduced_size"] == 2
    assert found["failures"][0]["degrees_after"] == [2, 1]


def random_log(rng: random.Random) -> tuple[Log, float]:
    """A job with failures at random moments; also when its last whole line was written."""
    log, t, durable = Log(), 0.0, 0

    def later(longest: float) -> float:
        nonlocal t
        t += rng.uniform(1e-5, longest)
        return t

    log.add(t, "job_start", nominal_world_size=4, fingerprint=FINGERPRINT)
    for attempt in range(rng.randint(1, 5)):
        world = 4 if not attempt else rng.randint(1, 4)
        log.launch(later(2), list(range(world, 4)), world, [world])
        lines: list[tuple[str, dict[str, Any]]] = [
            ("process_start", {"rank": rng.randrange(4)}),
            ("load_start", {"step": durable}),
            ("load_end", {"step": durable}),
            ("train_start", {"step": durable}),
        ]
        for step in range(durable, durable + rng.randint(1, 12)):
            lines.append(("step", {"step": step, "tokens": rng.randint(0, 500)}))
            if rng.random() < 0.3:
                lines += [("save_start", {}), ("save_end", {}), ("save_complete", {"step": step})]
            if rng.random() < 0.2:
                lines += [("validation_start", {}), ("validation_end", {})]
        for event, fields in lines[: rng.randint(0, len(lines))]:
            log.add(later(3), event, **fields)
            if event == "save_complete":
                durable = fields["step"]
        if rng.random() < 0.8:
            log.add(later(3), "failure", ranks=[rng.randrange(4)], detect_s=rng.uniform(0, 9))
            log.add(later(1), "stop_done")
        else:
            log.add(later(1), "attempt_end", reason=rng.choice(("finished", "failure")))
    return log, t


@pytest.mark.parametrize("damage", [False, True])
def test_books_balance(tmp_path: Path, damage: bool) -> None:
    rng = random.Random(5)
    for _ in range(300):
        log, last = random_log(rng)
        broken = 0
        if damage:
            for _ in range(rng.randint(1, 4)):
                # Before the last whole line, so that the wall time stays known.
                place = rng.randint(1, len(log.lines) - 1)
                log.lines.insert(place, rng.choice(("{}\n", "\x00\x01\n", '{"t": 1, "eve\n')))
                broken += 1
            log.lines.append('{"t": 17000')
            broken += 1
        found = report(read_run(log.write(tmp_path)))
        assert found["wall_s"] == pytest.approx(last, abs=1e-3)
        assert set(found["badput_s"]) == set(BADPUT)
        assert min(found["badput_s"].values()) >= 0
        assert found["kept_s"] >= 0
        total = found["kept_s"] + sum(found["badput_s"].values())
        assert total == pytest.approx(found["wall_s"], abs=1e-3)
        assert found["time_goodput"] <= 1
        assert len(found["damaged_lines"]) == broken
        for line in found["damaged_lines"]:
            assert line["file"] == "events.jsonl"
            assert line["line"] > 0
            assert line["reason"]


def test_compare(tmp_path: Path) -> None:
    for name, loss in (("a", 2.0), ("b", 2.5)):
        worked_example().write(tmp_path / name)
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": loss}) + "\n")
    found = compare([read_run(tmp_path / "a"), read_run(tmp_path / "b")])
    assert [run["run"] for run in found["runs"]] == ["a", "b"]
    assert found["loss_max_rel_difference"] == pytest.approx(0.25)


@pytest.mark.parametrize("part", ["model", "batch", "data"])
def test_other_jobs_are_refused(tmp_path: Path, part: str) -> None:
    worked_example().write(tmp_path / "a")
    other = worked_example()
    other.lines[0] = json.dumps(
        {**json.loads(other.lines[0]), "fingerprint": {**FINGERPRINT, part: {
            key: 99 for key in FINGERPRINT[part]}}}
    ) + "\n"  # fmt: skip
    with pytest.raises(UserError, match=f"{part}.*99"):
        compare([read_run(tmp_path / "a"), read_run(other.write(tmp_path / "b"))])
