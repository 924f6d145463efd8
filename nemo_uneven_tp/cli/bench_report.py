"""The report of ``uneven-tp bench`` as tables with their legend."""

from __future__ import annotations

from typing import Any

from nemo_uneven_tp.cli.table import ranks as shown_ranks
from nemo_uneven_tp.cli.table import size, table

ROWS_SHOWN = 32
"""Ranks up to which each has its own row; above, like ranks share one."""

LEGEND = """\
rank: as the whole job numbers it. shard: gradients of its share and of replicated parameters.
sync: bytes a rank hands to collectives between replicas before the optimizer step, one pass;
gather: parameters after it; in cell: replicated values passed on inside the replica.
optimizer: main parameters and moments. staging: buffers that buckets are packed into.
FLOPs: of the rank's share over those of the model divided by living ranks.
bound of optimizer state: (fp32 main parameter + moments) of the shard / number of replicas.
"""
TIMES_LEGEND = """\
Times are medians of paired rounds that alternate in this run, on CPU over loopback; nothing
failed / stock: whole steps of one micro-batch per replica.
all-reduce: what a rank of the smallest degree sends, in one stock all-reduce.
checkpoint: ours with checksums made and compared, stock Megatron on as many ranks without.
reshard-first: arXiv 2504.06095 section 3, with all-reduce; counts are of the busiest rank.
"""


def report_text(report: dict[str, Any]) -> str:
    """All tables."""
    parts = [_heading(report), _ranks(report["ranks"]), _ratios(report)]
    legend = LEGEND + (TIMES_LEGEND if report["noop_pairs"] else "")
    return "\n\n".join([*parts, legend])


def _heading(report: dict[str, Any]) -> str:
    how = "measured in a real step on this machine"
    if report["counts"] == "computed":
        how = f"computed from the plan ({report['why_computed']})"
    degrees: dict[int, int] = {}
    for degree in report["degrees"]:
        degrees[degree] = degrees.get(degree, 0) + 1
    cells = ", ".join(f"{n} of degree {degree}" for degree, n in degrees.items())
    return f"{report['name']}: replicas: {cells}\nCounts are {how}."


def _ranks(ranks: list[dict[str, Any]]) -> str:
    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for rank in ranks:
        key = (rank["degree"], rank["shard_bytes"], rank["grad_sync_bytes"])
        alike.setdefault(key if len(ranks) > ROWS_SHOWN else (rank["rank"],), []).append(rank)
    rows = []
    for members in alike.values():
        first = members[0]
        numbers = shown_ranks([rank["nominal_rank"] for rank in members])
        rows.append(
            (
                numbers if len(numbers) <= 24 else f"{numbers[:20]}... ({len(members)})",
                first["degree"],
                size(first["shard_bytes"]),
                size(first["grad_sync_bytes"]),
                size(first["param_gather_bytes"]),
                size(first["cell_broadcast_bytes"]),
                first["grad_sync_calls"] + first["param_gather_calls"],
                size(max(rank["optimizer_bytes"] for rank in members)),
                size(first["staging_bytes"]),
                f"{max(rank['flops_share_over_ideal'] for rank in members):.3f}",
            )
        )
    header = (
        *("rank", "degree", "shard", "sync", "gather", "in cell", "calls"),
        *("optimizer", "staging", "FLOPs"),
    )
    return table(header, rows)


def _ratios(report: dict[str, Any]) -> str:
    peer = report["reshard_first"]
    rows: list[tuple[str, str]] = [
        (
            "bytes into gradient sync / shard, worst rank",
            _number(report, "grad_sync_bytes_over_shard"),
        ),
        ("the same for reshard-first", _number(peer, "grad_sync_bytes_over_shard")),
        ("  and its two all-to-alls", size(peer["all_to_all_bytes"])),
        ("  and its side buffers", size(peer["side_buffer_bytes"])),
        (
            "bytes of parameter gather / shard, worst rank",
            _number(report, "param_gather_bytes_over_shard"),
        ),
        ("optimizer state / bound, worst rank", _number(report, "optimizer_bytes_over_bound")),
        ("FLOPs / ideal, worst rank", _number(report, "flops_share_over_ideal")),
        ("sync groups (at most)", f"{report['sync_groups']} ({report['sync_groups_bound']})"),
    ]
    if report["noop_pairs"]:
        pairs = f"step time, nothing failed / stock ({report['noop_pairs']} pairs)"
        low, high = report["noop_step_time_ratio_quartiles"]
        value = f"{_number(report, 'noop_step_time_ratio')} (quartiles {low:.3f} to {high:.3f})"
        rows.append((pairs, value))
    if "sync_time_s" in report:
        rows += [
            ("sync time, segments / all-reduce", _number(report, "sync_time_ratio_to_all_reduce")),
            ("sync time, reshard-first / segments", _number(peer, "sync_time_ratio_to_segments")),
            ("step time, reshard-first / segments", _number(peer, "step_time_ratio_to_segments")),
        ]
    if "checkpoint" in report:
        rows += _checkpoint(report["checkpoint"])
    return table(("what", "value"), rows)


def _checkpoint(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("checkpoint, bytes of files / of the state", f"{found['file_bytes_over_state']:.4f}"),
    ]
    for what in ("save", "load"):
        low, high = found[f"{what}_time_ratio_to_stock_quartiles"]
        ratio = f"{_number(found, f'{what}_time_ratio_to_stock')} "
        rows.append(
            (
                f"checkpoint {what} time / stock ({found['rounds']} pairs)",
                f"{ratio}(quartiles {low:.3f} to {high:.3f})",
            )
        )
    return rows


def _number(values: dict[str, Any], key: str) -> str:
    return f"{values[key]:.4f}"
