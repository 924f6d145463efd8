"""Runs of the same job next to each other: whether they can be compared, and the numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.goodput.run import GoodputRun, report

NEEDED = ("model", "batch")
"""Parts of a fingerprint without which nobody can tell whether two runs are the same job."""


def compare(runs: Sequence[GoodputRun]) -> dict[str, Any]:
    """Reports of all runs, the first being the baseline, and how far their losses differ.

    Raises:
        UserError: if two of them train another model, batch or data.
    """
    baseline, *others = runs
    for run in others:
        check_comparable(baseline, run)
    names = labels(runs)
    speeds = (run.speed(name) for run, name in zip(runs, names, strict=True))
    speed = next((found for found in speeds if found is not None), None)
    return {
        "baseline": names[0],
        "runs": [
            {**report(run, speed), "run": name} for run, name in zip(runs, names, strict=True)
        ],
        "loss_max_rel_difference": loss_difference(baseline, others),
    }


def labels(runs: Sequence[GoodputRun]) -> list[str]:
    """A short name for each run: its folder, with as many parents as tell them apart."""
    parts = [run.path.resolve().parts for run in runs]
    depth = 1
    while depth < max(map(len, parts)) and len({p[-depth:] for p in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(p[-depth:]).removeprefix("//") for p in parts]


def check_comparable(baseline: GoodputRun, run: GoodputRun) -> None:
    """Refuse runs of different jobs.

    Raises:
        UserError: naming the first thing that differs, or what is not known.
    """
    how = f"{run.path} can't be compared with {baseline.path}"
    if run.path.resolve() == baseline.path.resolve():
        raise UserError(f"{how}: it is the same run; give another one")
    for one in (baseline, run):
        missing = [part for part in NEEDED if not one.fingerprint.get(part)]
        if missing:
            raise UserError(
                f"{how}: the events of {one.path} don't tell its {' and '.join(missing)}; only "
                "runs whose job_start or train_start event has a fingerprint can be compared"
            )
    first, second = (dict(_flat(one.fingerprint)) for one in (baseline, run))
    different = [key for key in first if key in second and first[key] != second[key]]
    if different:
        key = different[0]
        more = f" (and {len(different) - 1} more differ)" if len(different) > 1 else ""
        raise UserError(
            f"{how}: {key} is {first[key]} in the baseline and {second[key]} here{more}; compare "
            "runs that train the same model on the same data with the same global batch"
        )


def loss_difference(baseline: GoodputRun, others: Sequence[GoodputRun]) -> float | None:
    """Largest relative difference of the losses of a step; ``None`` if no step is in both."""
    differences = [
        abs(run.losses[step] - loss) / max(abs(loss), 1e-30)
        for run in others
        for step, loss in baseline.losses.items()
        if step in run.losses
    ]
    return max(differences, default=None)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
