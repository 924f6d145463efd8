"""Jobs that are killed while they save go on from a complete checkpoint.

Every kill is of one job that is started again in another layout, saving in place or in the
background. ``UNEVEN_TP_KILLS`` sets how many there are.
"""

from __future__ import annotations

import json
import os
import random
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("nemo.lightning")

from nemo_uneven_tp.checkpoint import files
from tests.jobs import Launcher

KILLS = int(os.environ.get("UNEVEN_TP_KILLS", "30"))
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
AT_LEAST_HIT = 5
"""One of so many kills, or more, must have fallen into a save."""


def read(path: Path) -> list[dict[str, object]]:
    """The lines of a file of JSON lines; a half-written one is left out."""
    found = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


def losses(run_dir: Path) -> dict[object, object]:
    """Loss of each step; later lines count."""
    return {line["step"]: line["loss"] for line in read(run_dir / "metrics.jsonl")}


def saves(run_dir: Path, event: str) -> int:
    """How many saves have begun or ended."""
    return sum(line["event"] == event for line in read(run_dir / "events.jsonl"))


def unfinished_saves(run_dir: Path) -> int:
    """How many saves have begun and not ended."""
    return saves(run_dir, "save_start") - saves(run_dir, "save_complete")


@pytest.mark.timeout(200 + 30 * KILLS)
def test_killed_jobs_go_on(tmp_path: Path) -> None:
    rng = random.Random(KILLS)
    run_dir = tmp_path / "killed"
    settings = (*SETTINGS, f"data.cache_dir={tmp_path / 'cache'}")
    job = (*settings, f"run_dir={run_dir}", "resume.auto=true", "checkpoint.every_n_steps=1")
    hits = 0
    with Launcher(tmp_path) as launcher:
        launcher.start(*settings, f"run_dir={tmp_path / 'whole'}", LAYOUTS[0])
        assert launcher.wait(300) == 0, launcher.output()
        whole = losses(tmp_path / "whole")
        assert list(whole) == list(range(STEPS))

        newest = None
        for number in range(KILLS):
            asynchronous = f"checkpoint.async_save={str(number % 4 > 1).lower()}"
            before = unfinished_saves(run_dir)
            # The first save of a process starts helpers and takes seconds, later ones do not.
            event = "save_complete" if number % 3 == 0 else "save_start"
            wanted = saves(run_dir, event) + rng.randint(1, 2)
            launcher.start(*job, LAYOUTS[number % 2], asynchronous)
            end = time.monotonic() + 120
            while saves(run_dir, event) < wanted:
                assert time.monotonic() < end, launcher.output()
                assert launcher.code() is None, launcher.output()
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 0.6))  # a step and its save take about as long
            launcher.kill()
            assert launcher.wait(60) == 1, launcher.output()
            hits += unfinished_saves(run_dir) > before
            if newest is not None:
                assert f"resuming from {newest.path}" in launcher.output()
            done = losses(run_dir)
            assert done == pytest.approx({step: whole[step] for step in done}, rel=1e-5)
            found = files.complete(files.find(run_dir))
            newest = found[0] if found else None
            assert not any(files.damages(checkpoint.path) for checkpoint in found)

        launcher.start(*job, LAYOUTS[KILLS % 2])
        assert launcher.wait(300) == 0, launcher.output()
        assert newest is not None
        assert f"resuming from {newest.path}" in launcher.output()
    assert losses(run_dir) == pytest.approx(whole, rel=1e-5)
    sys.stdout.write(f"{hits} of {KILLS} kills fell into a save\n")
    assert hits * AT_LEAST_HIT >= KILLS, f"{hits} of {KILLS} kills fell into a save"
