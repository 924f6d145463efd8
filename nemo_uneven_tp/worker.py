"""Entry of each process of a run: ``python -m nemo_uneven_tp.worker RUN_DIR``, or :func:`enter`.

Light on purpose. Processes of failed ranks leave before torch is imported, and saving a
checkpoint starts helper processes that import this module again.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from nemo_uneven_tp import failure, processes, ranks
from nemo_uneven_tp.errors import USER_ERROR_EXIT_CODE, UserError
from nemo_uneven_tp.events import (
    EVENTS_FILE,
    EventWriter,
    attempt_of_environment,
    process_started_at,
)
from nemo_uneven_tp.nemo import logs
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.run_files import LOG_FILE, read
from nemo_uneven_tp.topology import Topology

FAILED_EXIT_CODE = 1


def main(run_dir: str) -> int:
    """Take part in the run whose ``config.yaml`` and ``plan.json`` are in ``run_dir``.

    Returns the exit code: 0 also for a rank that is not part of the run.
    """
    folder = Path(run_dir)
    processes.forked_children_die_with_us()
    try:
        config, plan = read(folder)
        rank = _enter(plan)
    except UserError as error:
        failure.report(str(error), USER_ERROR_EXIT_CODE)
        return USER_ERROR_EXIT_CODE
    if rank is None:
        return 0
    nominal = ranks.nominal_rank() if ranks.launched() else 0
    events = EventWriter(folder / EVENTS_FILE, attempt=attempt_of_environment(), rank=nominal)
    events.write("process_start", t=process_started_at())
    _prepare_environment(config)
    with logs.noise_to(folder / LOG_FILE, config["launcher"]["log_level"], rank) as console:
        code, sentence = _train(config, plan, folder, console, events if rank == 0 else None)
    events.close()
    if sentence:
        failure.report(sentence, code)
    return code


def enter(run_dir: str, variables: Mapping[str, str]) -> int:
    """:func:`main` in a process forked from one that has imported everything.

    Args:
        variables: of the environment; what the process has inherited is of the first launch.

    Returns 0 once all is done, and ends the process with another code.
    """
    processes.die_with_parent(os.getppid())
    os.environ.update(variables)
    with (Path(run_dir) / LOG_FILE).open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 2)  # the server's is that of its first launch
    code = main(run_dir)
    _end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    if code:
        os._exit(code)
    return 0


def _enter(plan: Plan) -> int | None:
    """This process's rank among the living; ``None`` if it is not one of them."""
    if not ranks.launched():
        if plan.nominal_world_size > 1:
            raise UserError(
                f"the run has {plan.nominal_world_size} ranks, but no launcher has numbered this "
                "process; start it with `uneven-tp pretrain`, torchrun or srun"
            )
        return 0
    if plan.compact_rank(ranks.nominal_rank()) is None:
        return None
    # Before any import: libraries read the rank when they are loaded.
    ranks.enter_compact_ranks(cast(Topology, plan))  # a plan has all that is read
    return plan.compact_rank(ranks.nominal_rank())


def _prepare_environment(config: dict[str, Any]) -> None:
    if config.get("trainer", {}).get("accelerator") == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "SLURM_NTASKS" in os.environ:
        # srun has numbered this process, in an allocation that Lightning takes for a shell too.
        if os.environ.get("SLURM_JOB_NAME", "bash") in ("bash", "interactive"):
            os.environ["SLURM_JOB_NAME"] = "uneven-tp"
        # Lightning refuses `srun --ntasks` alone; how many run on a node is in the config.
        devices = config.get("trainer", {}).get("devices", os.environ["SLURM_NTASKS"])
        os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(devices))
    # NeMo's only door to the time limit of collectives.
    timeout_s = str(config["launcher"]["timeout_s"])
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", timeout_s)


def _train(
    config: dict[str, Any],
    plan: Plan,
    run_dir: Path,
    console: logs.Console,
    events: EventWriter | None,
) -> tuple[int, str]:
    """Train; returns the exit code and, if it failed, one sentence."""
    try:
        # The imports make millions of objects that stay: collecting among them is wasted time.
        gc.disable()
        from nemo_uneven_tp.nemo import pretrain

        gc.freeze()
        gc.enable()
        _renumber_lightning()
        if events is not None:
            events.write("imports_done")
        pretrain.run(config, plan, run_dir, console)
        _leave_together()
    except UserError as error:
        return USER_ERROR_EXIT_CODE, str(error)
    except Exception as error:
        traceback.print_exc()  # into train.log
        lines = str(error).strip().splitlines()
        return FAILED_EXIT_CODE, f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    return 0, ""


def _renumber_lightning() -> None:
    """Tell Lightning the rank, which it has read at its import: perhaps before the fork."""
    from lightning.pytorch.utilities import rank_zero_only

    rank_zero_only.rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def _leave_together() -> None:
    """Close the process groups when all ranks are done: a rank must not see a peer vanish."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _end_children() -> None:
    """End the processes that saving checkpoints has started: this one leaves without exit hooks."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(10)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m nemo_uneven_tp.worker RUN_DIR")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        processes.die_with_parent()  # a launcher that was killed must not leave a job behind
    exit_code = main(sys.argv[1])
    _end_children()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written. Taking the interpreter apart under the threads of torch.distributed can
    # still end a finished run with an abort.
    os._exit(exit_code)
