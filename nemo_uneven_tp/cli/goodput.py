"""``uneven-tp goodput report|compare``: what a job's time went into, from its ``events.jsonl``.

Reads files; needs no GPU, no torch and no NeMo.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_uneven_tp.cli.table import table
from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.goodput.books import BADPUT
from nemo_uneven_tp.goodput.compare import compare
from nemo_uneven_tp.goodput.run import read_run, report

USAGE = "uneven-tp goodput report RUN | compare BASELINE RUN... [--json] [--html FILE]"
UNKNOWN = "-"
_DAMAGED_SHOWN = 5


def goodput(arguments: Sequence[str]) -> int:
    """Run the subcommand; returns the exit code."""
    command, places, as_json, html = _parse(arguments)
    runs = [read_run(place) for place in places]
    found = report(runs[0]) if command == "report" else compare(runs)
    if html is not None:
        from nemo_uneven_tp.goodput.page import write_page

        write_page(runs, html)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        sys.stdout.write(in_words(found) + "\n")
        if html is not None:
            sys.stdout.write(f"\n{html}\n")
    return 0


def _parse(arguments: Sequence[str]) -> tuple[str, list[Path], bool, Path | None]:
    rest = list(arguments)
    as_json = "--json" in rest
    rest = [argument for argument in rest if argument != "--json"]
    html = None
    for i, argument in enumerate(rest):
        name, equals, value = argument.partition("=")
        if name == "--html":
            given = [value] if equals else rest[i + 1 : i + 2]
            if not given or not given[0] or given[0].startswith("-"):
                raise UserError(f"goodput --html: no file given; usage is {USAGE}")
            html = Path(given[0]).expanduser()
            del rest[i : i + (1 if equals else 2)]
            break
    command, *places = rest or [""]
    fits = {"report": len(places) == 1, "compare": len(places) >= 2}
    if not fits.get(command) or any(place.startswith("-") for place in places):
        raise UserError(f"goodput {' '.join(arguments)}: usage is {USAGE}")
    return command, [Path(place).expanduser() for place in places], as_json, html


def in_words(found: dict[str, Any]) -> str:
    """Tables of a :func:`report` or of a :func:`compare`; columns are runs."""
    runs = found.get("runs", [found])
    parts = [table(["", *(run["run"] for run in runs)], _numbers(runs))]
    rows = [row for run in runs for row in _failures(run)]
    if rows:
        header = ["run", "rank", "kind", "step", *_TIMES, "degrees after"]
        parts.append("failures, times in seconds\n" + table(header, rows))
    if "loss_max_rel_difference" in found:
        loss = found["loss_max_rel_difference"]
        said = "no step has a loss in both runs" if loss is None else f"{loss:.2e}"
        parts.append(f"largest relative difference of losses: {said}")
    parts += [_damaged(run) for run in runs if run["damaged_lines"]]
    return "\n\n".join(parts)


def _numbers(runs: Sequence[dict[str, Any]]) -> list[list[str]]:
    def row(name: str, cells: Sequence[str]) -> list[str]:
        return [name, *cells]

    rows = [
        row("policy", [run["policy"] or UNKNOWN for run in runs]),
        row("state", [run["state"] for run in runs]),
        row("wall time", [_seconds(run["wall_s"]) for run in runs]),
        row("token goodput", [_percent(run["token_goodput"]) for run in runs]),
        row("GPU goodput", [_percent(run["gpu_goodput"]) for run in runs]),
        row("time goodput", [_percent(run["time_goodput"]) for run in runs]),
        row("tokens kept", [f"{run['tokens_kept']:,}" for run in runs]),
        row("steps kept", [f"{run['steps_kept']:,}" for run in runs]),
        row("steps lost", [f"{run['steps_lost']:,}" for run in runs]),
        row("kept", [_share(run["kept_s"], run) for run in runs]),
    ]
    rows += [
        row(name.replace("_", " "), [_share(run["badput_s"][name], run) for run in runs])
        for name in BADPUT
    ]
    return rows


_TIMES = {
    "detect": "detect_s",
    "stop": "stop_s",
    "wait": "wait_s",
    "start": "start_s",
    "load": "load_s",
    "first step": "first_step_s",
}


def _failures(run: dict[str, Any]) -> list[list[str]]:
    return [
        [
            run["run"],
            _text(row["rank"]),
            row["kind"],
            _text(row["step"]),
            *(UNKNOWN if row[key] is None else f"{row[key]:.2f}" for key in _TIMES.values()),
            _text(row["degrees_after"]),
        ]
        for row in run["failures"]
    ]


def _damaged(run: dict[str, Any]) -> str:
    lines = run["damaged_lines"]
    named = [f"{d['file']} line {d['line']} ({d['reason']})" for d in lines[:_DAMAGED_SHOWN]]
    more = len(lines) - len(named)
    end = f", and {more} more (--json names all)" if more else ""
    return f"{run['run']}: skipped {len(lines)} damaged: {', '.join(named)}{end}"


def _text(value: Any) -> str:
    return UNKNOWN if value is None else str(value)


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.1f} %"


def _seconds(value: float) -> str:
    return f"{value:,.1f} s"


def _share(value: float, run: dict[str, Any]) -> str:
    wall = run["wall_s"]
    return f"{_seconds(value)} {100 * value / wall if wall else 0:5.1f} %"
