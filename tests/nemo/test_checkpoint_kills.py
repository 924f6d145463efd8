"""Jobs that are killed while they save go on from a complete checkpoint.

One kill by default; ``UNEVEN_TP_KILLS=30`` for the long version.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("nemo.lightning")

from nemo_uneven_tp.checkpoint import files

KILLS = int(os.environ.get("UNEVEN_TP_KILLS", "1"))
STEPS = 8 + 3 * KILLS
STDLIB = Path(sysconfig.get_paths()["stdlib"])
SETTINGS = (
    f"data.paths=[{STDLIB / 'argparse.py'},{STDLIB / 'typing.py'}]",
    "model.num_layers=2",
    "model.seq_length=64",
    f"trainer.max_steps={STEPS}",
    "data.global_batch_size=6",
    "data.micro_batch_size=1",
    "optim.lr=1e-4",  # rounding must not grow over the steps
    "optim.min_lr=1e-5",
    "optim.warmup_steps=1",
)
LAYOUTS = ("uneven_tp.degrees=[2,1]", "uneven_tp.degrees=[1,2]")


def start(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """``uneven-tp pretrain`` in the background."""
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    cache = f"data.cache_dir={folder / 'cache'}"
    return subprocess.Popen(
        [sys.executable, "-m", "nemo_uneven_tp", "pretrain", *SETTINGS, cache, *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += descendants(int(child))
    return found


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL for a job: launcher, ranks and whatever they have started."""
    for pid in descendants(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(30)


def losses(run_dir: Path) -> dict[int, float]:
    """Loss of each step; later lines count, a half-written one does not."""
    found = {}
    if (run_dir / "metrics.jsonl").exists():
        for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                found.update({json.loads(line)["step"]: json.loads(line)["loss"]})
    return found


@pytest.mark.timeout(200 + 120 * KILLS)
def test_killed_jobs_go_on(tmp_path: Path) -> None:
    whole = start(tmp_path, f"run_dir={tmp_path / 'whole'}", LAYOUTS[0])
    output = whole.communicate(timeout=300)[0]
    assert whole.returncode == 0, output

    rng = random.Random(KILLS)
    run_dir = tmp_path / "killed"
    job = (f"run_dir={run_dir}", "resume.auto=true", "checkpoint.every_n_steps=1")
    for number in range(KILLS):
        done = losses(run_dir)
        options = (LAYOUTS[number % 2], f"checkpoint.async_save={str(number % 4 > 1).lower()}")
        process = start(tmp_path, *job, *options)
        wanted = max(done, default=-1) + rng.randint(1, 3)
        lines = 0 if not done else len((run_dir / "metrics.jsonl").read_text().splitlines())
        end = time.monotonic() + 180
        while time.monotonic() < end and process.poll() is None:
            if max(losses(run_dir), default=-1) >= min(wanted, STEPS - 2) and (
                lines < len((run_dir / "metrics.jsonl").read_text().splitlines())
                and files.complete(files.find(run_dir))
            ):
                break
            time.sleep(0.02)
        assert process.poll() is None, process.communicate()[0]
        time.sleep(rng.uniform(0, 1.5))  # a step and its save take about as long
        kill(process)
        assert process.stdout is not None
        assert number == 0 or "resuming from" in process.stdout.read()
    last = start(tmp_path, *job, LAYOUTS[KILLS % 2])
    output = last.communicate(timeout=300)[0]
    assert last.returncode == 0, output
    assert "resuming from" in output
    expected = losses(tmp_path / "whole")
    assert losses(run_dir) == pytest.approx(expected, rel=1e-5)
