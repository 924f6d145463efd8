"""``uneven-tp demo``: the same run twice, stock and with a lost rank, and what differs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from nemo_uneven_tp.cli.pretrain import Run, prepare, start
from nemo_uneven_tp.cli.table import table
from nemo_uneven_tp.config.compose import split_arguments
from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.run_files import METRICS_FILE, RESULT_FILE, refuse_used

LARGEST_RELATIVE_DIFFERENCE = 1e-5
"""What the order of fp32 sums explains over a few dozen steps; more is an error."""

LEGEND = """\
degrees: tensor-parallel ranks of each replica. loss: mean over all tokens of the global batch.
replicas equal: whether all replicas hold bitwise the same weights at the end.
"""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a finished run left. ``losses[i]`` is the loss of step i."""

    losses: list[float]
    tokens_per_step: int
    step_time_s: float
    replicas_equal: bool


def demo(arguments: Sequence[str]) -> int:
    """Run the subcommand; further overrides go to both runs, ``uneven_tp...`` to the second."""
    line = split_arguments(arguments)
    own = [override for override in line.overrides if override.startswith("uneven_tp")]
    base = next((o for o in line.overrides if o.startswith("run_dir=")), None)
    folder = base.partition("=")[2] if base else f"runs/demo-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    common = [*line.options, *(o for o in line.overrides if o not in own and o != base)]
    asked = {
        "stock": ["uneven_tp=off"],
        "uneven": own or ["uneven_tp.failed_ranks=[3]"],
    }
    runs = {}
    for name, overrides in asked.items():
        run = prepare("uneven-tp demo", [*common, *overrides, f"run_dir={folder}/{name}"])
        if run is None:
            return 0
        refuse_used(run.run_dir)
        runs[name] = run
    for run in runs.values():
        code = start(run)
        if code:
            return code
    outcomes = {name: outcome_of(run.run_dir) for name, run in runs.items()}
    return report(runs, outcomes)


def outcome_of(run_dir: Path) -> Outcome:
    """Read a finished run.

    Raises:
        UserError: if it has not left its metrics and result.
    """
    try:
        lines = (run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        steps: list[dict[str, Any]] = [json.loads(line) for line in lines]
        result = json.loads((run_dir / RESULT_FILE).read_text(encoding="utf-8"))
        return Outcome(
            losses=[step["loss"] for step in steps],
            tokens_per_step=steps[-1]["tokens"],
            step_time_s=median(step["step_time_s"] for step in steps),
            replicas_equal=result["replicas_equal"],
        )
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"{run_dir} holds no finished run: {error}") from error


def largest_relative_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Over all steps; infinite if the runs have different numbers of steps."""
    if len(first) != len(second):
        return float("inf")
    return max(abs(a - b) / abs(a) for a, b in zip(first, second, strict=True))


def report(runs: dict[str, Run], outcomes: dict[str, Outcome]) -> int:
    """Print the comparison; 0 if both runs agree, 1 if not."""
    rows = [
        (
            name,
            run.plan.world_size,
            "+".join(str(degree) for degree in run.plan.degrees),
            f"{outcomes[name].losses[-1]:.6f}",
            outcomes[name].tokens_per_step,
            f"{outcomes[name].step_time_s:.3f}",
            "yes" if outcomes[name].replicas_equal else "NO",
        )
        for name, run in runs.items()
    ]
    header = (
        "run",
        "ranks",
        "degrees",
        "final loss",
        "tokens per step",
        "step time (s)",
        "replicas equal",
    )
    losses = [outcome.losses for outcome in outcomes.values()]
    difference = largest_relative_difference(losses[0], losses[1])
    agree = difference <= LARGEST_RELATIVE_DIFFERENCE
    equal = all(outcome.replicas_equal for outcome in outcomes.values())
    sys.stdout.write(
        f"\n{table(header, rows)}\n\nlargest relative loss difference over {len(losses[0])} steps: "
        f"{difference:.1e} (allowed: {LARGEST_RELATIVE_DIFFERENCE:.0e})\n{LEGEND}"
        f"files: {', '.join(str(run.run_dir) for run in runs.values())}\n"
    )
    if not agree:
        sys.stderr.write("uneven-tp demo: the losses of the two runs differ by more than allowed\n")
    if not equal:
        sys.stderr.write("uneven-tp demo: the replicas of a run differ\n")
    return 0 if agree and equal else 1
