"""Local launch: console and log, failures in one sentence, no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

REPOSITORY = Path(__file__).parents[2]
PARENT = """
import sys
from pathlib import Path
from nemo_uneven_tp import launch
from nemo_uneven_tp.errors import UserError
from tests.cli import fake_worker
launch.WORKER_MODULE = launch.PRELOADED = "tests.cli.fake_worker"
launch.enter = fake_worker.enter
run_dir, start_method = Path(sys.argv[1]), sys.argv[2]
try:
    launch.launch(
        run_dir, processes=3, accelerator="cpu", threads_per_rank=1, start_method=start_method
    )
except (UserError, launch.WorkerFailedError) as error:
    print(f"{type(error).__name__}: {error}")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.fixture(params=["fresh", "forkserver"])
def start_method(request: pytest.FixtureRequest) -> str:
    """How the processes are started."""
    return str(request.param)


def start(run_dir: Path, todo: dict[str, str], start_method: str) -> subprocess.Popen[str]:
    (run_dir / "todo.json").write_text(json.dumps(todo))
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(run_dir), start_method],
        cwd=run_dir,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def outcome(run_dir: Path, todo: dict[str, str], start_method: str) -> tuple[str, str]:
    process = start(run_dir, todo, start_method)
    try:
        out, err = process.communicate(timeout=50)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out, err


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def assert_all_gone(run_dir: Path) -> None:
    pids = [int(file.read_text()) for file in run_dir.glob("pid*")]
    assert len(pids) == 3
    assert not [pid for pid in pids if alive(pid)]


def test_steps_go_to_the_console_and_the_rest_to_the_log(tmp_path: Path, start_method: str) -> None:
    out, err = outcome(tmp_path, {}, start_method)
    assert out == "step 1\n"
    assert err == ""
    log = (tmp_path / "train.log").read_text()
    assert all(f"noise of rank {rank}\n" in log for rank in range(3))
    assert json.loads((tmp_path / "env2").read_text()) == {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "3",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def test_a_failed_worker_is_named_and_the_others_end(tmp_path: Path, start_method: str) -> None:
    todo = {"0": "sleep", "1": "exit:1:RuntimeError: out of luck", "2": "sleep"}
    out, err = outcome(tmp_path, todo, start_method)
    log = tmp_path / "train.log"
    assert f"WorkerFailedError: rank 1 failed (RuntimeError: out of luck); see {log}\n" in out
    assert err == ""
    assert_all_gone(tmp_path)


def test_a_killed_worker_is_named(tmp_path: Path, start_method: str) -> None:
    out, _ = outcome(tmp_path, {"0": "sleep", "2": "die"}, start_method)
    assert "rank 2 failed (killed by SIGKILL)" in out
    assert_all_gone(tmp_path)


def test_bad_input_found_by_a_worker_is_a_user_error(tmp_path: Path, start_method: str) -> None:
    todo = {"0": "sleep", "1": "exit:2:model.x=1 is wrong; change it"}
    out, _ = outcome(tmp_path, todo, start_method)
    assert "UserError: model.x=1 is wrong; change it\n" in out


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_processes(tmp_path: Path, signal_number: int, start_method: str) -> None:
    process = start(tmp_path, {"0": "sleep", "1": "sleep", "2": "sleep"}, start_method)
    try:
        end = time.monotonic() + 40
        while len(list(tmp_path.glob("env*"))) < 3 and time.monotonic() < end:
            time.sleep(0.1)
        process.send_signal(signal_number)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert ("interrupted" if signal_number == signal.SIGINT else "stopped by SIGTERM") in out
    assert_all_gone(tmp_path)


def test_forked_workers_end_with_a_killed_launcher(tmp_path: Path) -> None:
    process = start(tmp_path, {"0": "sleep", "1": "sleep", "2": "sleep"}, "forkserver")
    end = time.monotonic() + 40
    while len(list(tmp_path.glob("env*"))) < 3 and time.monotonic() < end:
        time.sleep(0.1)
    process.kill()
    process.wait()
    end = time.monotonic() + 5
    while any(alive(int(file.read_text())) for file in tmp_path.glob("pid*")):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert_all_gone(tmp_path)
