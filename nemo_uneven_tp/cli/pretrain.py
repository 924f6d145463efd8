"""``uneven-tp pretrain``: check everything, then start the workers or be one of them.

Nothing is started or written before configuration, plan, text, packages and devices have
been found good.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_uneven_tp import ranks
from nemo_uneven_tp.checkpoint.files import complete_from
from nemo_uneven_tp.config.validate import Config
from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.events import process_started_at
from nemo_uneven_tp.job_events import recorded
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.run_files import LOG_FILE

_JOB_ID_VARIABLES = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
_NO_JOB_ID = "none"  # torchrun's --rdzv-id when it is not given


@dataclass(frozen=True, kw_only=True)
class Run:
    """A checked run that can be started."""

    config: Config
    plan: Plan
    run_dir: Path


def pretrain(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit code."""
    run = prepare("uneven-tp pretrain", arguments)
    if run is None:
        return 0
    started = process_started_at()
    return _be_a_worker(run, started) if ranks.launched() else start(run, started)


def prepare(program: str, arguments: Sequence[str]) -> Run | None:
    """Compose, check and plan a run; ``None`` if Hydra only had to print something.

    Raises:
        UserError: if anything is wrong with what is asked for.
    """
    from nemo_uneven_tp.config.compose import compose, name_run_after_job
    from nemo_uneven_tp.config.request import plan_of, refuse_stages
    from nemo_uneven_tp.config.validate import checked

    composed = compose(program, arguments)
    if composed is None:
        return None
    if ranks.launched():
        name_run_after_job(composed, _job_id())
    config = checked(composed)
    if "recipe" in config:
        _check_packages_and_text(config)  # planning imports NeMo here
        plan = plan_of(config)
    else:
        plan = plan_of(config)
        _check_packages_and_text(config)
    refuse_stages(plan)
    _check_resume(config)
    run_dir = Path(config["run_dir"]).expanduser().absolute()
    return Run(config=config, plan=plan, run_dir=run_dir)


def start(run: Run, started: float | None = None) -> int:
    """Start local workers and wait for them; returns the exit code.

    Args:
        started: when the job began (``time.time()``), for its events; default: now.
    """
    from nemo_uneven_tp.run_files import create, refuse_used

    nodes, accelerator = _nodes_and_accelerator(run.config)
    if nodes > 1:
        raise UserError(
            f"trainer.num_nodes={nodes} needs a launcher on every node; start the same command "
            "with torchrun or srun, or set trainer.num_nodes=1"
        )
    resume = goes_on(run.config)
    refuse_used(run.run_dir, resume)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    from nemo_uneven_tp.launch import WorkerFailedError, check_devices, launch

    check_devices(accelerator, run.plan)
    create(run.run_dir, run.config, run.plan, resume)
    sys.stdout.write(_opening_line(run))
    sys.stdout.flush()
    launcher = run.config["launcher"]
    try:
        with recorded(run.run_dir, run.config, run.plan, started):
            launch(
                run.run_dir,
                run.plan.nominal_world_size,
                accelerator,
                launcher["threads_per_rank"],
                start_method=launcher["start_method"],
            )
    except WorkerFailedError as error:
        sys.stderr.write(f"uneven-tp: {error}\n")
        return 1
    return 0


def _be_a_worker(run: Run, job_started: float) -> int:
    """Take part in a job whose processes torchrun or Slurm has started."""
    from nemo_uneven_tp.run_files import create, refuse_used, wait_for

    started = ranks.nominal_world_size()
    if started != run.plan.nominal_world_size:
        raise UserError(
            f"trainer.devices * trainer.num_nodes={run.plan.nominal_world_size}, but the launcher "
            f"started {started} processes; make both the nominal number, failed ranks included"
        )
    compact = run.plan.compact_rank(ranks.nominal_rank())
    if compact is None:
        return 0
    resume = goes_on(run.config)
    if compact == 0:
        refuse_used(run.run_dir, resume)
        create(run.run_dir, run.config, run.plan, resume)
        with recorded(run.run_dir, run.config, run.plan, job_started) as outcome:
            code = _work(run)
            outcome.reason = "failure" if code else "finished"
        return code
    else:
        timeout_s = run.config["launcher"]["timeout_s"]
        wait_for(run.run_dir, run.plan, timeout_s, run.config if resume else None)
    return _work(run)


def _work(run: Run) -> int:
    from nemo_uneven_tp.worker import main

    return int(main(str(run.run_dir)) or 0)


def goes_on(config: Config) -> bool:
    """Whether a run may go on in a ``run_dir`` that holds one (``resume.auto``)."""
    return bool(config.get("resume", {}).get("auto", False))


def _check_resume(config: Config) -> None:
    place = config.get("resume", {}).get("from")
    if place == "":
        raise UserError(
            "resume.from= is empty; give a run directory or a checkpoint folder, or null for none"
        )
    if place is not None:
        complete_from(Path(place).expanduser().absolute())


def _check_packages_and_text(config: Config) -> None:
    from nemo_uneven_tp.text_files import resolve_text_files
    from nemo_uneven_tp.versions import check_versions

    check_versions()
    if "data" not in config:
        return
    size = sum(file.stat().st_size for file in resolve_text_files(config["data"]["paths"]))
    seq_length = config["model"]["seq_length"]
    if 2 * size <= seq_length:  # no tokenizer makes more than two tokens of a byte
        raise UserError(
            f"model.seq_length={seq_length} is more than the text of data.paths can fill, which "
            f"is {size} bytes; lower it or give more text"
        )


def _nodes_and_accelerator(config: Config) -> tuple[int, str]:
    if "recipe" in config:
        from nemo_uneven_tp.nemo.recipe import nodes_and_accelerator

        return nodes_and_accelerator(config)
    return config["trainer"]["num_nodes"], config["trainer"]["accelerator"]


def _job_id() -> str | None:
    found = (os.environ.get(name) for name in _JOB_ID_VARIABLES)
    return next((job_id for job_id in found if job_id and job_id != _NO_JOB_ID), None)


def _opening_line(run: Run) -> str:
    stock = not run.config["uneven_tp"]["enabled"]
    how = "stock NeMo" if stock else f"degrees {run.plan.degree_table}"
    living = f"{run.plan.world_size} of {run.plan.nominal_world_size} ranks"
    return (
        f"{run.config['name']}: {living}, {how}; "
        f"log in {run.run_dir / LOG_FILE} (importing NeMo takes a while)\n"
    )
