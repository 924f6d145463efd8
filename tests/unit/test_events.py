"""Appending to and reading of events.jsonl, also when writers are killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_uneven_tp import events
from nemo_uneven_tp.events import EVENTS_FILE, EventWriter

WRITER = """
import sys
from pathlib import Path
from nemo_uneven_tp.events import EventWriter
writer = EventWriter(Path(sys.argv[1]), attempt=int(sys.argv[2]), rank=0)
print("ready", flush=True)
step = 0
while True:
    writer.write("step", step=step, tokens=512, duration_s=0.5, padding="x" * 100000)
    step += 1
"""


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    with EventWriter(path, attempt=2, rank=3) as writer:
        writer.write("step", t=12.5, step=7, tokens=1024, duration_s=0.25)
    with EventWriter(path) as writer:
        writer.write("job_end", reason="finished")
    first, last = events.read(path).events
    assert (first.t, first.event, first.attempt, first.rank) == (12.5, "step", 2, 3)
    assert (first.get("step"), first.get("tokens"), first.get("duration_s")) == (7, 1024, 0.25)
    assert (first.pid, first.line, last.line) == (os.getpid(), 1, 2)
    assert (last.rank, last.get("reason"), last.get("nothing", 5)) == (None, "finished", 5)
    assert abs(last.t - time.time()) < 5


def test_damaged_lines_are_skipped_and_named(tmp_path: Path) -> None:
    good = '{"t":1.5,"event":"step","attempt":0,"rank":0,"host":"a","pid":1,"step":1,"tokens":8}'
    lines = {
        "not a JSON object": ["{", "[1]", "7", good[:-1], good + good, "\0\0\0", "[" * 100_000],
        "not UTF-8 text": [],
        "no time t": ['{"event":"step"}', good.replace("1.5", "NaN"), good.replace("1.5", "true")],
        "no event name": ['{"t":1.5}'],
        "attempt is no integer": [good.replace('"attempt":0', '"attempt":"0"')],
        "tokens of step is no integer": [good.replace('"tokens":8', '"tokens":"8"')],
        "step has no tokens": [good.replace('"tokens":8', '"more":8')],
    }
    path = tmp_path / EVENTS_FILE
    written = [(text, reason) for reason, texts in lines.items() for text in texts]
    content = [good.encode()]
    for text, _ in written:
        content += [text.encode(), good.encode()]
    content += [b"\xff\xfe", b""]
    path.write_bytes(b"\n".join(content))
    history = events.read(path)
    assert len(history.events) == len(written) + 1
    assert [line.reason for line in history.damaged] == [r for _, r in written] + ["not UTF-8 text"]
    assert [line.line for line in history.damaged[:3]] == [2, 4, 6]


def test_unknown_events_and_fields_are_kept(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    with EventWriter(path) as writer:
        writer.write("tea_break", cups=2)
    assert events.read(path).events[0].get("cups") == 2


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_line_costs_that_line_only(tmp_path: Path, cut: int) -> None:
    path = tmp_path / EVENTS_FILE
    supervisor = EventWriter(path)
    worker = EventWriter(path, rank=0)
    supervisor.write("attempt_start")
    worker.write("step", step=0, tokens=8)
    os.truncate(path, path.stat().st_size - cut)
    supervisor.write("failure", ranks=[0])  # was open all the time
    os.truncate(path, path.stat().st_size - cut)
    EventWriter(path, rank=0).write("train_start", step=0)  # opens it anew
    history = events.read(path)
    if cut == 1:  # only the line's end was lost
        assert [e.event for e in history.events] == [
            "attempt_start", "step", "failure", "train_start"
        ]  # fmt: skip
    else:
        assert [e.event for e in history.events] == ["attempt_start", "train_start"]
        assert [line.line for line in history.damaged] == [2, 3]


def test_killed_writers_spoil_no_line_of_others(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    supervisor = EventWriter(path)
    draw = random.Random(5)
    for attempt in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(attempt)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(draw.uniform(0, 0.03))
        process.kill()
        process.wait(10)
        process.stdout.close()
        supervisor.write("failure", ranks=[0], kind="killed")
    history = events.read(path)
    assert sum(e.event == "failure" for e in history.events) == 12
    assert len(history.damaged) <= 12
    for attempt in range(12):
        steps = [e.get("step") for e in history.events if e.attempt == attempt and e.rank == 0]
        assert steps == list(range(len(steps)))


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    code = WRITER.replace("while True", "while step < 200").replace("100000", "5000")
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(path), str(i)], stdout=subprocess.DEVNULL)
        for i in range(3)
    ]
    assert [process.wait(30) for process in processes] == [0, 0, 0]
    history = events.read(path)
    assert not history.damaged
    for attempt in range(3):
        steps = [e.get("step") for e in history.events if e.attempt == attempt]
        assert steps == list(range(200))


def test_a_full_disk_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    writer = EventWriter(Path("/dev/full"), rank=0)
    writer.write("step", step=0, tokens=8)
    writer.write("step", step=1, tokens=8)
    assert caplog.text.count("No space left on device") == 1


def test_one_write_an_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = EventWriter(tmp_path / EVENTS_FILE, rank=0)
    written: list[bytes] = []

    def write(file: int, data: bytes) -> int:
        written.append(data)
        return len(data)

    monkeypatch.setattr(os, "write", write)
    writer.write("step", step=0, tokens=8, duration_s=0.1)
    (line,) = written
    assert json.loads(line)["step"] == 0
    assert line.endswith(b"\n")
    assert len(line) < 256


def test_process_start_is_before_now_and_not_long_ago() -> None:
    code = (
        "import time; from nemo_uneven_tp.events import process_started_at; "
        "print(time.time(), process_started_at())"
    )
    before = time.time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    now, started = (float(word) for word in done.stdout.split())
    assert before - 0.05 < started < now


def test_the_attempt_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, attempt in (("", 0), ("3", 3), ("x", 0)):
        monkeypatch.setenv(events.ATTEMPT_VARIABLE, text)
        assert events.attempt_of_environment() == attempt
