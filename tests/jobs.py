"""Jobs of ``uneven-tp pretrain`` one after another in one process, which imports NeMo once.

    with Launcher(folder) as launcher:
        launcher.start("run_dir=...")  # then wait(), or kill() at any moment

As a program (``python -m tests.jobs``), that process: a list of arguments as JSON per line in,
a line with the exit code out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from nemo_uneven_tp import processes

ROOT = Path(__file__).parents[1]
ENDED = "the job ended with code"


class Launcher:
    """The process, its output in ``folder / "jobs.log"``."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "jobs.log"
        unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        environment = {k: v for k, v in os.environ.items() if k not in unset}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "tests.jobs"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env=environment,
            )
        self._begin = 0

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pid in processes.descendants(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(30)

    def start(self, *overrides: str) -> None:
        """Start a job; the one before must have ended."""
        self._begin = self.log.stat().st_size
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(overrides) + "\n")
        self.process.stdin.flush()

    def output(self) -> str:
        """What the job has printed so far."""
        with self.log.open("rb") as log:
            log.seek(self._begin)
            return log.read().decode(errors="replace")

    def code(self) -> int | None:
        """The exit code of the job; ``None``: it has not ended."""
        assert self.process.poll() is None, self.output()
        last = self.output().rpartition(ENDED)
        return int(last[2].split()[0]) if last[1] and last[2].endswith("\n") else None

    def wait(self, timeout_s: float) -> int:
        """The exit code of the job, once it has ended."""
        end = time.monotonic() + timeout_s
        while (code := self.code()) is None:
            assert time.monotonic() < end, self.output()
            time.sleep(0.02)
        return code

    def kill(self) -> None:
        """SIGKILL for all ranks at once, and for whatever they have started."""
        spared = _python_helpers(self.process.pid)
        for pid in processes.descendants(self.process.pid):
            if pid not in spared:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _python_helpers(pid: int) -> set[int]:
    """Children of a process that serve its ``multiprocessing``: they are no ranks."""
    found = set()
    for below in processes.descendants(pid):
        with suppress(OSError):
            command = Path(f"/proc/{below}/cmdline").read_bytes()
            parent = int(Path(f"/proc/{below}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and (b"forkserver" in command or b"resource_tracker" in command):
                found.add(below)
    return found


def serve() -> None:
    """Run the jobs named on standard input."""
    from nemo_uneven_tp.cli.main import main

    processes.die_with_parent()
    for line in sys.stdin:
        code = main(["pretrain", *json.loads(line)])
        sys.stdout.write(f"{ENDED} {code}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
