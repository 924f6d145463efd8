"""Local worker processes, through torch.distributed's own launcher (torchrun's API).

One process per nominal rank on this machine, meeting on the loopback interface; no
restarts. The launcher ends all of them when one fails and when this process gets a signal.
Workers inherit standard output, where rank 0 prints its steps, and write standard error to
``train.log``. Imports torch, so it is imported late.

Workers are fresh Python processes, or forked from a server that has imported NeMo once
(:mod:`nemo_uneven_tp.preload`), which later launches of the same process use again.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nemo_uneven_tp import processes
from nemo_uneven_tp.errors import USER_ERROR_EXIT_CODE, UnevenTPError, UserError
from nemo_uneven_tp.events import ATTEMPT_VARIABLE
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.run_files import LOG_FILE
from nemo_uneven_tp.worker import enter

WORKER_MODULE = "nemo_uneven_tp.worker"
PRELOADED = "nemo_uneven_tp.preload"
_SECONDS_TO_LEAVE = "10"


class WorkerFailedError(UnevenTPError, RuntimeError):
    """A worker process ended with an error; the message is one sentence for the user.

    Args:
        rank: nominal rank of the first one to fail; ``None``: this process was told to stop.
        exit_code: how it ended; negative: the signal that killed it.
    """

    def __init__(
        self, message: str, *, rank: int | None = None, exit_code: int | None = None
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exit_code = exit_code


def check_devices(accelerator: str, plan: Plan) -> None:
    """Check that this machine has a device for each living rank.

    Raises:
        UserError: if GPUs are asked for that are not there.
    """
    if accelerator == "cpu" or (accelerator == "auto" and not torch.cuda.is_available()):
        return
    if not torch.cuda.is_available():
        raise UserError(
            f"trainer.accelerator={accelerator}, but torch finds no GPU here; set "
            "trainer.accelerator=cpu or start on a machine with GPUs"
        )
    highest = max(rank for cell in plan.cells for rank in cell.nominal_ranks)
    if highest >= torch.cuda.device_count():
        raise UserError(
            f"trainer.devices={plan.nominal_world_size}, but torch finds "
            f"{torch.cuda.device_count()} GPUs here and rank {highest} is not in "
            "uneven_tp.failed_ranks; change one of them"
        )


def launch(
    run_dir: Path,
    processes: int,
    accelerator: str,
    threads_per_rank: int,
    module: str | None = None,
    start_method: str = "fresh",
) -> None:
    """Run ``python -m MODULE RUN_DIR`` (default: our workers) in every process, to their end.

    Args:
        start_method: ``fresh`` as above; ``forkserver`` forks :func:`worker.enter` and takes no
            ``module``; ``auto`` is the latter on CPUs, where a fork can't meet CUDA.

    Raises:
        UserError: if a worker found bad input.
        WorkerFailedError: if a worker failed; names the rank and ``train.log``.
        KeyboardInterrupt: if this process was asked to stop; the workers are gone then.
    """
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SECONDS_TO_LEAVE)
    log = run_dir / LOG_FILE
    variables = _worker_environment(accelerator, threads_per_rank)
    variables |= {ATTEMPT_VARIABLE: os.environ.get(ATTEMPT_VARIABLE, "0")}
    forks = start_method == "forkserver" or (start_method == "auto" and accelerator == "cpu")
    with (
        tempfile.TemporaryDirectory(prefix="uneven-tp-") as messages,
        _environment(variables),
        _standard_error_to(log),
        _leaving_no_process(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            start_method="forkserver" if forks else "spawn",
            logs_specs=DefaultLogsSpecs(log_dir=messages),
        )
        try:
            if forks:
                multiprocessing.set_forkserver_preload([PRELOADED])
                elastic_launch(config, enter)(str(run_dir), variables)
            else:
                command = ("-u", "-m", module or WORKER_MODULE, str(run_dir))
                elastic_launch(config, sys.executable)(*command)
        except ChildFailedError as error:
            said = _user_errors(Path(messages))
            if said:
                raise UserError(said[0]) from error
            raise _failure(list(error.failures.values()), log) from error
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from error
            raise WorkerFailedError(f"stopped by {error.sigval.name}") from error


def _user_errors(messages: Path) -> list[str]:
    """The sentences of workers that found bad input.

    Read from what they left: torch's launcher tells one failure of forked processes, and that
    may be of a rank that only lost its peer.
    """
    found = []
    for path in sorted(messages.rglob("error.json")):
        try:
            said = json.loads(path.read_text(encoding="utf-8"))
            if said.get("exit_code") == USER_ERROR_EXIT_CODE:
                found.append(str(said["message"]))
        except (OSError, ValueError, LookupError, AttributeError):
            continue
    return found


def _failure(failures: list[ProcessFailure], log: Path) -> UnevenTPError:
    """The failure to tell: the earliest."""
    first = min(failures, key=lambda f: f.timestamp)
    said = first.message if Path(first.error_file).is_file() else ""
    if first.exitcode < 0:
        said = f"killed by {first.signal_name()}"
    reason = f" ({said})" if said else f" with exit code {first.exitcode}"
    return WorkerFailedError(
        f"rank {first.local_rank} failed{reason}; see {log}",
        rank=first.local_rank,
        exit_code=first.exitcode,
    )


def _worker_environment(accelerator: str, threads_per_rank: int) -> dict[str, str]:
    variables = {"OMP_NUM_THREADS": str(threads_per_rank)}
    if accelerator == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    if sys.platform == "linux" and "GLOO_SOCKET_IFNAME" not in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve does no harm
    return variables


@contextmanager
def _leaving_no_process() -> Iterator[None]:
    """Kill what workers have left behind, such as writers of checkpoints of a killed one."""
    processes.become_subreaper()
    before = processes.descendants()
    try:
        yield
    finally:
        processes.kill_descendants(spare={*before, *processes.helpers()})


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _standard_error_to(log: Path) -> Iterator[None]:
    """Append what this process and its children write to file descriptor 2 to ``log``."""
    sys.stderr.flush()
    console = os.dup(2)
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(console, 2)
        os.close(console)
