"""``uneven-tp checkpoint inspect|verify PATH``: what checkpoints hold, and whether they are whole.

Reads metadata and checksums; needs no process group, no GPU and no NeMo.
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

from nemo_uneven_tp.checkpoint import files
from nemo_uneven_tp.cli.table import size, table
from nemo_uneven_tp.errors import UserError

USAGE = "uneven-tp checkpoint inspect|verify PATH [--json]"
DAMAGED_EXIT_CODE = 1
OPTIMIZER = "optimizer.state."


def checkpoint(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit code."""
    as_json = "--json" in arguments
    rest = [argument for argument in arguments if argument != "--json"]
    if len(rest) != 2 or rest[0] not in ("inspect", "verify"):
        raise UserError(f"checkpoint {' '.join(arguments)}: usage is {USAGE}")
    command, place = rest[0], Path(rest[1]).expanduser().absolute()
    found = files.find(place)
    if not found:
        raise UserError(f"{place} holds no checkpoint; give a run directory or a checkpoint folder")
    reports = [report(one, command == "inspect") for one in found]
    if as_json:
        sys.stdout.write(json.dumps(reports, indent=2) + "\n")
    else:
        sys.stdout.write("\n\n".join(in_words(one) for one in reports) + "\n")
    whole = all(one["complete"] and not one["damages"] for one in reports)
    return 0 if whole or command == "inspect" else DAMAGED_EXIT_CODE


def report(found: files.Checkpoint, with_tensors: bool) -> dict[str, Any]:
    """What is known of a checkpoint, as plain data. Reads all its files to check them."""
    damages = files.damages(found.path)
    about = None
    if files.has_checksums(found.path):
        checked = "checksums of all files"
        with suppress(OSError, ValueError):  # among the damages
            about = files.read_manifest(found.path)["about"]
    else:
        checked = "lengths of the data files (a stock checkpoint has no checksums)"
    tensors: list[dict[str, Any]] = []
    if found.problem is None and (with_tensors or about is None):
        tensors, short = _look_inside(found.path)
        damages = damages or short
    sizes = [(found.path / name).stat().st_size for name in files.files_of(found.path)]
    return {
        "path": str(found.path),
        "complete": found.problem is None,
        "problem": found.problem,
        "checked": checked,
        "damages": damages,
        "about": about,
        "files": len(sizes),
        "bytes": sum(sizes),
        "tensors": tensors if with_tensors else [],
    }


def _look_inside(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The tensors of a checkpoint, and which of its data files are too short."""
    # Megatron, whose class the metadata is, talks when it is imported.
    with warnings.catch_warnings(action="ignore"), redirect_stderr(io.StringIO()):
        from nemo_uneven_tp.checkpoint.stored import read_metadata, short_files, stored_tensors

        try:
            metadata = read_metadata(path)
        except ValueError as error:
            return [], [str(error)]
    tensors = [
        {"key": t.key, "shape": t.shape, "dtype": t.dtype, "bytes": t.nbytes}
        for t in stored_tensors(metadata)
    ]
    return tensors, short_files(path, metadata)


def in_words(one: dict[str, Any]) -> str:
    """A report as text for the terminal."""
    about = one["about"] or {}
    state = "complete" if one["complete"] else f"not complete: {one['problem']}"
    lines = [one["path"], f"  {state}; {one['files']} files, {size(one['bytes'])}"]
    if about:
        how = f"degrees {about['degrees']}" if about.get("uneven_tp") else "stock NeMo"
        nominal = f"TP{about['tensor_model_parallel_size']} job"
        sharded = "distributed" if about["use_distributed_optimizer"] else "plain"
        lines.append(
            f"  {about['run']} after {about['step']} steps, written by {how} ({nominal}), "
            f"{about['precision']}, {sharded} optimizer"
        )
    if one["damages"]:
        lines += [f"  damaged: {damage}" for damage in one["damages"]]
    else:
        lines.append(f"  whole by the {one['checked']}")
    if one["tensors"]:
        lines += ["", _tensors(one["tensors"])]
    return "\n".join(lines)


def _tensors(tensors: list[dict[str, Any]]) -> str:
    model = [t for t in tensors if not t["key"].startswith(OPTIMIZER)]
    rows: list[tuple[Any, ...]] = [
        (t["key"], list(t["shape"]), t["dtype"], size(t["bytes"])) for t in model
    ]
    rows.append(("all parameters", "", "", size(sum(t["bytes"] for t in model))))
    parts = [table(("parameter", "global shape", "dtype", "size"), rows)]
    states: dict[str, list[dict[str, Any]]] = {}
    for tensor in tensors:
        if tensor["key"].startswith(OPTIMIZER):
            name = tensor["key"].removeprefix(OPTIMIZER).split(".")[0]
            states.setdefault(name, []).append(tensor)
    if states:
        held = [(n, len(ts), size(sum(t["bytes"] for t in ts))) for n, ts in sorted(states.items())]
        parts.append(table(("optimizer state", "tensors", "size"), held))
    else:
        parts.append("no optimizer state")
    return "\n\n".join(parts)
