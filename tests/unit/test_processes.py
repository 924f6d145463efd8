"""Helpers end with their parent, leftovers with their launcher: real processes, real kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_uneven_tp import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's prctl")

WORKER = """
import multiprocessing, os, sys, time
from nemo_uneven_tp import processes

def sleep(depth):
    if depth:
        multiprocessing.get_context("fork").Process(target=sleep, args=(depth - 1,)).start()
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(60)

if __name__ == "__main__":
    if sys.argv[1] == "hooked":
        processes.forked_children_die_with_us()
    sleep(2)
"""


def start(tmp_path: Path, how: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A worker with a child and a grandchild; returns their process ids too."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    worker = subprocess.Popen([sys.executable, script, how], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pids = [int(worker.stdout.readline()) for _ in range(3)]
    return worker, [pid for pid in pids if pid != worker.pid]


def runs(pid: int) -> bool:
    """Whether a process is there and not only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: list[int], within_s: float = 5.0) -> bool:
    """Whether all of them end in time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(runs(pid) for pid in pids):
            return True
        time.sleep(0.01)
    return False


def test_forked_helpers_end_with_a_killed_worker(tmp_path: Path) -> None:
    worker, helpers = start(tmp_path, "hooked")
    worker.kill()
    worker.wait(10)
    assert gone(helpers)


def test_a_launcher_kills_what_a_killed_worker_leaves(tmp_path: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from nemo_uneven_tp import processes
from tests.unit.test_processes import start, runs
processes.become_subreaper()
spared, others = start(Path({str(tmp_path)!r}), "hooked")
worker, helpers = start(Path({str(tmp_path)!r}), "plain")
worker.kill()
worker.wait(10)
assert all(runs(pid) for pid in helpers), "they outlive a worker that does nothing about it"
killed = processes.kill_descendants(spare=[spared.pid, *others])
assert sorted(killed) == sorted(helpers), (killed, helpers)
assert not any(Path(f"/proc/{{pid}}").exists() for pid in helpers)
assert spared.poll() is None and all(runs(pid) for pid in others)
assert set(processes.kill_descendants()) == {{spared.pid, *others}}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_parent_that_is_gone_ends_its_child_at_once() -> None:
    child = os.fork()
    if child == 0:
        processes.die_with_parent(parent=1 << 30)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
