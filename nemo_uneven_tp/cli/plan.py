"""``uneven-tp plan``: print the plan of a run as tables, or as JSON, and start nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from nemo_uneven_tp.cli.plan_report import (
    Precision,
    RankReport,
    parameter_count,
    rank_reports,
    report_dict,
)
from nemo_uneven_tp.cli.table import ranks, size, table
from nemo_uneven_tp.config.validate import Config
from nemo_uneven_tp.plan import Plan, SyncGroup
from nemo_uneven_tp.shares import Axis

ROWS_SHOWN = 32
"""Rows up to which every rank has its own; above, like ranks share a row."""

_AXES = {Axis.QUERY_GROUP: "query groups", Axis.FFN: "FFN columns", Axis.VOCAB: "vocab rows"}

LEGEND = """\
nominal: a rank's number in the undamaged job; compact: its number among the living.
degree: tensor-parallel ranks of the {cell}. Shares are first-last (count).
micro-batches: computed by the replica per step, out of the whole global batch.
holds: parameters, {parameter_bytes} bytes each, dummy vocabulary rows included.
sends: gradients a rank hands to gradient sync per step, {gradient_bytes} bytes each: its own
  shard's to the sync groups below, the replicated parameters' to the first ranks of all replicas.
"""
SPEED_LEGEND = """\
speed: relative to a healthy rank; time/ideal: expected compute time per step over that of work
  spread over all ranks exactly by their speeds.
"""


def plan(arguments: Sequence[str]) -> int:
    """Run the subcommand; ``--json`` may stand anywhere among ``arguments``."""
    from nemo_uneven_tp.config.compose import compose
    from nemo_uneven_tp.config.request import plan_of
    from nemo_uneven_tp.config.validate import checked

    as_json = "--json" in arguments
    composed = compose("uneven-tp plan", [token for token in arguments if token != "--json"])
    if composed is None:
        return 0
    config = checked(composed)
    made = plan_of(config)
    precision = precision_of(config)
    if as_json:
        sys.stdout.write(json.dumps(report_dict(made, precision), indent=2, sort_keys=True) + "\n")
    else:
        sys.stdout.write(plan_text(config["name"], made, precision))
    return 0


def precision_of(config: Config) -> Precision:
    """Element sizes of a run; recipes train in bf16 and reduce gradients in fp32 unless told."""
    if "recipe" in config:
        return Precision.of("bf16-mixed", grad_reduce_in_fp32=True)
    return Precision.of(config["trainer"]["precision"], config["strategy"]["grad_reduce_in_fp32"])


def plan_text(name: str, made: Plan, precision: Precision) -> str:
    """The tables with their legend."""
    speeds = any(cell.speeds for cell in made.cells)
    legend = (LEGEND + (SPEED_LEGEND if speeds else "")).format(
        cell="replica" if made.stages == 1 else "stage of the replica",
        parameter_bytes=precision.parameter_bytes,
        gradient_bytes=precision.gradient_bytes,
    )
    parts = [
        _summary(name, made),
        "Replicas\n" + _cells(made),
        "Ranks\n" + _ranks(rank_reports(made, precision), made),
        _sync_groups(made),
        legend,
    ]
    return "\n\n".join(parts)


def _summary(name: str, made: Plan) -> str:
    gone = f"gone: {ranks(made.failed_ranks)}" if made.failed_ranks else "none gone"
    replicas = made.nominal_world_size // (made.tensor_model_parallel_size * made.stages)
    stages = f" x PP{made.stages}" if made.stages > 1 else ""
    lines = [
        f"{name}: {made.world_size} of {made.nominal_world_size} ranks, {gone}; whole job: "
        f"TP{made.tensor_model_parallel_size}{stages} x DP{replicas}",
        f"{parameter_count(made) / 1e6:,.2f}M parameters; vocabulary of {made.vocab_size} rows, "
        f"padded and initialized as at TP{made.reference_tensor_parallel_size}",
        f"global batch: {made.global_batch_size} samples of {made.model.seq_length} tokens in "
        f"micro-batches of {made.micro_batch_size}",
    ]
    if made.dropped_replicas:
        lines.append(f"dropped replicas (nominal): {ranks(made.dropped_replicas)}")
    return "\n".join(lines)


def _cells(made: Plan) -> str:
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, cell in enumerate(made.cells):
        kind = (cell.stage, cell.degree, made.micro_batches[cell.replica])
        alike.setdefault(kind if made.replicas > ROWS_SHOWN else (*kind, i), []).append(i)
    rows: list[tuple[object, ...]] = []
    staged = made.stages > 1
    for members in alike.values():
        cells = [made.cells[i] for i in members]
        rows.append(
            (
                ranks([cell.replica for cell in cells]),
                *([cells[0].stage] if staged else []),
                _shortened(ranks([rank for cell in cells for rank in cell.nominal_ranks])),
                _shortened(ranks([rank for cell in cells for rank in cell.ranks])),
                cells[0].degree,
                made.micro_batches[cells[0].replica],
            )
        )
    stage = ["stage"] if staged else []
    header = ["replica", *stage, "nominal ranks", "compact ranks", "degree", "micro-batches"]
    return table(header, rows)


def _ranks(reports: Sequence[RankReport], made: Plan) -> str:
    staged = made.stages > 1
    alike: dict[tuple[Any, ...], list[RankReport]] = {}
    for report in reports:
        own = (report.speed, tuple(report.shares.values()))
        kind = (report.stage, report.degree, report.tp_rank, *own)
        key = kind if made.world_size > ROWS_SHOWN else (*kind, report.rank)
        alike.setdefault(key, []).append(report)
    rows = []
    with_speeds = any(report.speed != 1 for report in reports)
    for members in alike.values():
        first = members[0]
        rows.append(
            (
                _shortened(ranks([member.nominal_rank for member in members])),
                _shortened(ranks([member.rank for member in members])),
                *([first.stage] if staged else []),
                f"{first.tp_rank} of {first.degree}",
                *(
                    _units(*first.shares[axis.value]) if made.segments(axis, first.stage) else "-"
                    for axis in Axis
                ),
                size(first.parameter_bytes),
                f"{size(first.sent_sharded_bytes)} + {size(first.sent_replicated_bytes)}",
                *((f"{first.speed:.3g}", f"{first.time_over_ideal:.2f}") if with_speeds else ()),
            )
        )
    stage = ["stage"] if staged else []
    header = ["nominal", "compact", *stage, "TP rank", *_AXES.values()]
    header += ["holds", "sends (own + replicated)"]
    if with_speeds:
        header += ["speed", "time/ideal"]
    return table(header, rows)


def _sync_groups(made: Plan) -> str:
    leaders = {made.leaders(stage) for stage in range(made.stages)}

    def carried(group: SyncGroup, axis: Axis) -> str:
        own = [segment for segment in group.segments if segment.axis is axis]
        return ", ".join(_units(segment.start, segment.stop) for segment in own) or "-"

    rows = [
        (
            _shortened(ranks(group.ranks)),
            *(carried(group, axis) for axis in Axis),
            "yes" if group.ranks in leaders else "-",
        )
        for group in made.sync_groups
    ]
    header = ("compact ranks", *_AXES.values(), "replicated parameters")
    return f"Sync groups ({len(rows)})\n{table(header, rows)}"


def _units(start: int, stop: int) -> str:
    if stop - start < 2:
        return f"{start} (1)" if stop > start else "none"
    return f"{start}-{stop - 1} ({stop - start})"


def _shortened(text: str, limit: int = 40) -> str:
    if len(text) <= limit:
        return text
    kept = text[:limit].rpartition(",")[0]
    return f"{kept},... ({text.count(',') - kept.count(',')} more)"
