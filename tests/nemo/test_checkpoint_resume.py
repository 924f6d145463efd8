"""Checkpoints through `uneven-tp pretrain`: from stock to uneven, from uneven to another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOLERANCE = 1e-5
SMALL = ["model.seq_length=64", "model.num_layers=2"]
EVERY = ["checkpoint.every_n_steps=3", "checkpoint.keep=null"]
STOCK = ["uneven_tp=off"]
UNEVEN = ["uneven_tp.failed_ranks=[3]"]


def pretrain(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A real run of 6 steps, of the demo's schedule whatever is overridden."""
    command = [sys.executable, "-m", "nemo_uneven_tp", "pretrain", *SMALL, "trainer.max_steps=6"]
    return subprocess.run(
        [*command, f"run_dir={run_dir}", *overrides], capture_output=True, text=True, timeout=400
    )


def losses(run_dir: Path) -> dict[int, float]:
    """Loss of each step; later lines count."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``stock`` and ``uneven``: uninterrupted runs with a checkpoint every 3 steps."""
    folder = tmp_path_factory.mktemp("saved")
    for name, kind in (("stock", STOCK), ("uneven", UNEVEN)):
        done = pretrain(folder / name, *kind, *EVERY)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("written_by", "overrides"),
    [
        ("stock", UNEVEN),
        ("uneven", ["uneven_tp.failed_ranks=[0]"]),
    ],
    ids=["stock to uneven", "2+1 to 1+2"],
)
def test_another_layout_goes_on(
    saved: Path, tmp_path: Path, written_by: str, overrides: list[str]
) -> None:
    start = saved / written_by / "checkpoints" / "step_3"
    run_dir = tmp_path / "run"
    done = pretrain(run_dir, f"resume.from={start}", *overrides)
    assert done.returncode == 0, done.stderr
    expected = {step: loss for step, loss in losses(saved / "stock").items() if step >= 3}
    assert losses(run_dir) == pytest.approx(expected, rel=TOLERANCE)
