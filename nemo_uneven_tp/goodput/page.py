"""One self-contained HTML page about runs of the same job: plots by plotly, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.goodput.books import BADPUT, KEPT, class_of
from nemo_uneven_tp.goodput.compare import compare
from nemo_uneven_tp.goodput.run import GoodputRun, report
from nemo_uneven_tp.goodput.timeline import NANOSECONDS

COLOURS = {
    KEPT: "#2f9e6e",
    "start_up": "#4c78d0",
    "checkpoint_load": "#35a7c4",
    "checkpoint_save": "#8fb339",
    "lost_steps": "#d64550",
    "reduced_size": "#e0a030",
    "waiting": "#8a8f98",
    "evaluation": "#9b6bd0",
    "other": "#b58a6a",
}
RUN_COLOURS = ("#4c78d0", "#2f9e6e", "#e0a030", "#d64550", "#9b6bd0", "#35a7c4")
TIMES = ("detect_s", "stop_s", "wait_s", "start_s", "load_s", "first_step_s")


def write_page(runs: Sequence[GoodputRun], file: Path) -> None:
    """Write the page; the first run is the baseline.

    Raises:
        UserError: if plotly is missing, the runs can't be compared, or the file can't be written.
    """
    text = page(runs)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--html {file}: can't be written ({error.strerror}); give a file in a folder you own"
        ) from error


def page(runs: Sequence[GoodputRun]) -> str:
    """The page's HTML."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError(
            "--html needs plotly, which is not installed; pip install 'nemo-uneven-tp[report]', "
            "or leave --html out"
        ) from error
    found = compare(runs) if len(runs) > 1 else {"runs": [report(runs[0])]}
    reports = found["runs"]
    figures = {
        "tokens": _tokens(runs, reports),
        "timeline": _timeline(runs, reports),
        "badput": _badput(reports),
    }
    return _page(reports, figures, get_plotlyjs())


def _figure(traces: list[dict[str, Any]], rows: int | None = None, **layout: Any) -> str:
    import plotly.graph_objects as go

    height = 360 if rows is None else 190 + 44 * rows
    figure = go.Figure(traces)
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 10, "r": 10, "t": 10, "b": 10},
        legend={"orientation": "h", "x": 0, "y": -0.3 if rows is None else -0.6, "yanchor": "top"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        **layout,
    )
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    # A name of a run may hold the end of a script.
    return str(figure.to_json()).replace("</", "<\\/")


def _tokens(runs: Sequence[GoodputRun], reports: Sequence[dict[str, Any]]) -> str:
    traces = []
    for i, (run, found) in enumerate(zip(runs, reports, strict=True)):
        kept = [step for step in run.line.steps if step.kept]
        start = run.line.start_ns
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": found["run"],
                "x": [0.0, *((s.end_ns - start) / NANOSECONDS for s in kept), found["wall_s"]],
                "y": [0, *accumulate(s.tokens for s in kept), found["tokens_kept"]],
                "line": {"shape": "hv", "color": RUN_COLOURS[i % len(RUN_COLOURS)]},
            }
        )
    x, y = {"title": {"text": "seconds since job start"}}, {"title": {"text": "tokens kept"}}
    return _figure(traces, xaxis=x, yaxis=y, showlegend=True)


def _timeline(runs: Sequence[GoodputRun], reports: Sequence[dict[str, Any]]) -> str:
    bars: dict[str, tuple[list[float], list[float], list[str]]] = {}
    for run, found in zip(runs, reports, strict=True):
        joined: list[list[Any]] = []  # class, start, end; thousands of steps are one bar
        for span in run.line.spans:
            name = class_of(run.line, span)
            if joined and joined[-1][0] == name and joined[-1][2] == span.start_ns:
                joined[-1][2] = span.end_ns
            else:
                joined.append([name, span.start_ns, span.end_ns])
        for name, start, end in joined:
            base, length, label = bars.setdefault(name, ([], [], []))
            base.append((start - run.line.start_ns) / NANOSECONDS)
            length.append((end - start) / NANOSECONDS)
            label.append(found["run"])
    traces = [
        _bar(name, bars[name][1], bars[name][2], base=bars[name][0])
        for name in (KEPT, *BADPUT)
        if name in bars
    ]
    return _bars(traces, reports, "overlay", "seconds since job start")


def _badput(reports: Sequence[dict[str, Any]]) -> str:
    names = [found["run"] for found in reports]
    traces = [
        _bar(name, lengths, names)
        for name in BADPUT
        if any(lengths := [found["badput_s"][name] for found in reports])
    ]
    return _bars(traces, reports, "stack", "seconds of badput")


def _bar(name: str, lengths: list[float], labels: list[str], **more: Any) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name.replace("_", " "),
        "x": lengths,
        "y": labels,
        "marker": {"color": COLOURS[name], "line": {"width": 0}},
        **more,
    }


def _bars(
    traces: list[dict[str, Any]], reports: Sequence[dict[str, Any]], mode: str, title: str
) -> str:
    names = [found["run"] for found in reports]
    y = {"type": "category", "categoryarray": names[::-1], "categoryorder": "array"}
    x = {"title": {"text": title}}
    rows = len(names)
    return _figure(traces, rows, barmode=mode, xaxis=x, yaxis=y, showlegend=True)


def _page(reports: Sequence[dict[str, Any]], figures: dict[str, str], plotly: str) -> str:
    titles = {
        "tokens": "Tokens kept over time",
        "timeline": "What each run was doing",
        "badput": "Badput",
    }
    sections = "".join(
        f'<section><h2>{titles[name]}</h2><div class="plot" id="{name}"></div></section>\n'
        for name in figures
    )
    data = ",".join(f'"{name}":{text}' for name, text in figures.items())
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">
<title>Goodput</title><style>{_STYLE}</style></head><body>
<h1>Goodput</h1>
{_summary(reports)}{sections}{_failures(reports)}{_damaged(reports)}
<script>{plotly}</script>
<script>const figures={{{data}}};{_SCRIPT}</script>
</body></html>
"""


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _summary(reports: Sequence[dict[str, Any]]) -> str:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.1f} %"

    header = ["run", "policy", "token goodput", "GPU goodput", "time goodput", "tokens", "wall"]
    rows = [
        [
            found["run"],
            found["policy"] or "-",
            *(percent(found[name]) for name in ("token_goodput", "gpu_goodput", "time_goodput")),
            f"{found['tokens_kept']:,}",
            f"{found['wall_s']:.1f} s",
        ]
        for found in reports
    ]
    return f"<section>{_table(header, rows)}</section>\n"


def _failures(reports: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            found["run"],
            *("-" if row[name] is None else row[name] for name in ("rank", "kind", "step")),
            *("-" if row[name] is None else f"{row[name]:.2f}" for name in TIMES),
            "-" if row["degrees_after"] is None else row["degrees_after"],
        ]
        for found in reports
        for row in found["failures"]
    ]
    header = ["run", "rank", "kind", "step", *(name[:-2].replace("_", " ") for name in TIMES)]
    body = _table([*header, "degrees after"], rows) if rows else "<p>None.</p>"
    return f"<section><h2>Failures (times in seconds)</h2>{body}</section>"


def _damaged(reports: Sequence[dict[str, Any]]) -> str:
    rows = [
        [found["run"], line["file"], line["line"], line["reason"]]
        for found in reports
        for line in found["damaged_lines"]
    ]
    if not rows:
        return ""
    table = _table(["run", "file", "line", "reason"], rows)
    return f"<section><h2>Damaged lines, skipped</h2>{table}</section>"


_STYLE = """
:root{--ink:#1c2126;--page:#fff;--line:#d5d9de}
@media(prefers-color-scheme:dark){:root{--ink:#e4e7ea;--page:#15181b;--line:#3a4047}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1200px;padding:16px;font:15px/1.5 system-ui,sans-serif;
color:var(--ink);background:var(--page)}
h1{font-size:24px;margin:0 0 12px}h2{font-size:17px;margin:0 0 8px}section{margin:0 0 32px}
.plot{width:100%}.wide{overflow-x:auto}table{border-collapse:collapse}
th,td{text-align:left;padding:4px 12px 4px 0;border-bottom:1px solid var(--line);
white-space:nowrap;font-variant-numeric:tabular-nums}
"""
_SCRIPT = """
const dark=matchMedia('(prefers-color-scheme: dark)');
function draw(){
  const css=getComputedStyle(document.documentElement);
  const ink=css.getPropertyValue('--ink').trim(),line=css.getPropertyValue('--line').trim();
  for(const [id,f] of Object.entries(figures)){
    const layout={...f.layout,font:{color:ink,size:12},
      xaxis:{...f.layout.xaxis,gridcolor:line,zerolinecolor:line},
      yaxis:{...f.layout.yaxis,gridcolor:line,zerolinecolor:line}};
    Plotly.react(id,f.data,layout,{responsive:true,displayModeBar:false});
  }
}
draw();dark.addEventListener('change',draw);
"""
