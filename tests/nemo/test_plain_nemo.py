"""Checkpoints between runs of the plugin and stock NeMo where the plugin is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nemo.lightning")

import nemo_uneven_tp
from tests.nemo.test_checkpoint_runs import FIRST, STEPS, assert_goes_on, losses, pretrain

PLAIN = Path(__file__).with_name("plain_nemo.py")
CPU_MODE = Path(nemo_uneven_tp.__file__).with_name("cpu_mode.py")
UNEVEN = ("uneven_tp.failed_ranks=[3]", "optim.use_distributed_optimizer=false")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run at degrees 2 and 1 in ``run``."""
    folder = tmp_path_factory.mktemp("plain")
    done = pretrain(folder, f"run_dir={folder / 'run'}", *UNEVEN)
    assert done.returncode == 0, done.stderr
    return folder


def plain_nemo(folder: Path, name: str, *arguments: str, devices: int = 2) -> dict[int, float]:
    """Train with stock NeMo at TP2 in ``folder/name``; returns the loss of each step."""
    (prefix,) = {file.with_suffix("") for file in (folder / "cache").rglob("*.idx")}
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={devices}", PLAIN, f"--config={folder / 'run' / 'config.yaml'}",
            f"--folder={folder / name}", f"--cpu-mode={CPU_MODE}", f"--text={prefix}",
            f"--devices={devices}", *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((folder / name / "losses.json").read_text(encoding="utf-8"))
    return {int(step): loss for step, loss in found.items()}


@pytest.mark.timeout(600)
def test_nemo_without_the_plugin_goes_on_from_an_uneven_run(uneven: Path) -> None:
    start = uneven / "run" / "checkpoints" / f"step_{FIRST}" / "weights"
    found = plain_nemo(uneven, "after", f"--resume={start}")
    assert_goes_on(list(found.items()), losses(uneven / "run"))


@pytest.mark.timeout(600)
def test_an_uneven_run_goes_on_from_nemo_without_the_plugin(uneven: Path) -> None:
    whole = plain_nemo(uneven, "before", f"--save-every={FIRST}")
    assert len(whole) == STEPS
    (start,) = (p for p in (uneven / "before" / "checkpoints").iterdir() if "=2" in p.name)
    done = pretrain(uneven, f"run_dir={uneven / 'on'}", *UNEVEN, f"resume.from='{start}'")
    assert done.returncode == 0, done.stderr
    assert_goes_on(losses(uneven / "on"), list(whole.items()))
