"""The worker's way in and out, without training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_uneven_tp import run_files
from nemo_uneven_tp.cli.pretrain import prepare


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 100, encoding="utf-8")
    folder = tmp_path / "run"
    run = prepare("test", ["uneven_tp.failed_ranks=[3]", f"data.paths={text}", f"run_dir={folder}"])
    assert run is not None
    run_files.create(folder, run.config, run.plan)
    return folder


def worker(run_dir: Path, after: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Call ``worker.main`` in a fresh process; ``after`` is run once it has returned."""
    code = (
        "import sys\nfrom nemo_uneven_tp.worker import main\n"
        f"code = main({str(run_dir)!r})\n{after}\nsys.exit(code)"
    )
    outside = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS")
    environment = {k: v for k, v in os.environ.items() if k not in outside}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=50,
        env={**environment, **variables},
        check=False,
    )


def test_a_failed_rank_leaves_before_torch_is_imported(run_dir: Path) -> None:
    done = worker(run_dir, "assert 'torch' not in sys.modules", RANK="3", WORLD_SIZE="4")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (run_dir / run_files.LOG_FILE).exists()


def test_slurm_numbers_processes_too(run_dir: Path) -> None:
    done = worker(run_dir, SLURM_PROCID="3", SLURM_NTASKS="4")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_wrong_number_of_processes_is_one_sentence(run_dir: Path) -> None:
    message = run_dir / "message.json"
    done = worker(run_dir, RANK="0", WORLD_SIZE="2", TORCHELASTIC_ERROR_FILE=str(message))
    assert done.returncode == 2
    assert done.stderr == ""
    said = json.loads(message.read_text(encoding="utf-8"))["message"]
    assert "trainer.devices" in said


def test_without_a_launcher_many_ranks_are_refused(run_dir: Path) -> None:
    done = worker(run_dir)
    assert done.returncode == 2
    assert "no launcher" in done.stderr
    assert "Traceback" not in done.stderr


def test_noise_goes_to_the_log_and_lines_to_the_terminal(tmp_path: Path) -> None:
    code = f"""
import os, sys, warnings, logging
from pathlib import Path
from nemo_uneven_tp.nemo.logs import noise_to
with noise_to(Path({str(tmp_path / "train.log")!r}), "WARNING", 0) as console:
    print("a print")
    os.write(1, b"from C\\n")
    warnings.warn("a warning")
    logging.getLogger("nemo").setLevel("DEBUG")
    logging.getLogger("nemo").info("too low")
    logging.getLogger("nemo").error("an error")
    console.line("step 1")
print("after")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "step 1\nafter\n"
    assert done.stderr == ""
    log = (tmp_path / "train.log").read_text(encoding="utf-8")
    for text in ("a print", "from C", "a warning", "an error"):
        assert text in log
    assert "too low" not in log
