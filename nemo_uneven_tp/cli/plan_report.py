"""What a plan means for each rank: shares, bytes held, bytes sent (pure arithmetic).

Counted from the inventory of parameters, not measured. A rank hands its own shard's
gradients to gradient sync, segment by segment. Replicated parameters meet over the first
rank of each cell where replicas differ, and over every rank where all are alike. A rank
holds its share of every parameter, the dummy vocabulary rows of its cell included.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nemo_uneven_tp.costs import model_flops_per_token, rank_time
from nemo_uneven_tp.model_shape import parameters
from nemo_uneven_tp.plan import Cell, Plan
from nemo_uneven_tp.shares import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes of one element of a parameter and of a gradient that is sent."""

    parameter_bytes: int
    gradient_bytes: int

    @classmethod
    def of(cls, precision: str, grad_reduce_in_fp32: bool) -> Precision:
        """From ``trainer.precision`` and ``strategy.grad_reduce_in_fp32``."""
        parameter_bytes = 4 if precision == "32" else 2
        gradient_bytes = 4 if grad_reduce_in_fp32 else parameter_bytes
        return cls(parameter_bytes=parameter_bytes, gradient_bytes=gradient_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank: who it is and what it owns, holds and sends.

    ``shares`` maps an axis to ``(first unit, end)``. ``sent_sharded_bytes`` and
    ``sent_replicated_bytes`` are what it hands to gradient sync per step. ``speed`` is relative
    to a healthy rank's; ``time_over_ideal`` its expected compute time per step over that of work
    spread over all ranks exactly by their speeds.
    """

    rank: int
    nominal_rank: int
    replica: int
    stage: int
    degree: int
    tp_rank: int
    shares: dict[str, tuple[int, int]]
    parameter_bytes: int
    sent_sharded_bytes: int
    sent_replicated_bytes: int
    speed: float
    time_over_ideal: float


def parameter_count(plan: Plan) -> int:
    """Parameters of the whole model, padded vocabulary included; tied ones count once."""
    return sum(parameter.elements() for parameter in parameters(plan.model, plan.vocab_size))


def rank_reports(plan: Plan, precision: Precision) -> list[RankReport]:
    """A report for every living rank, in compact order."""
    counts: dict[tuple[tuple[int, ...], int, int], tuple[int, int, int]] = {}
    elements = [_elements(plan, stage) for stage in range(plan.stages)]
    ideal = model_flops_per_token(plan.model, plan.vocab_size) * plan.num_micro_batches
    ideal /= sum(cell.speed(i) for cell in plan.cells for i in range(cell.degree))
    reports = []
    for cell in plan.cells:
        per_unit, replicated = elements[cell.stage]
        for tp_rank, (rank, nominal) in enumerate(zip(cell.ranks, cell.nominal_ranks, strict=True)):
            shares = {axis: cell.share(axis, tp_rank) for axis in Axis}
            lengths = tuple(len(share) for share in shares.values())
            key = (lengths, _held_vocab_rows(cell), cell.stage)
            if key not in counts:
                owned = sum(per_unit[axis] * len(share) for axis, share in shares.items())
                dummies = _held_vocab_rows(cell) - len(shares[Axis.VOCAB])
                held = owned + replicated + per_unit[Axis.VOCAB] * dummies
                counts[key] = (held, owned, replicated)
            held, owned, shared = counts[key]
            meets = plan.replicas > 1
            tied = plan.ties_stages and not meets and cell.stage in (0, plan.stages - 1)
            alone = per_unit[Axis.VOCAB] * len(shares[Axis.VOCAB]) if tied else 0
            shares_replicated = meets and (plan.is_uniform or tp_rank == 0)
            reports.append(
                RankReport(
                    rank=rank,
                    nominal_rank=nominal,
                    replica=cell.replica,
                    stage=cell.stage,
                    degree=cell.degree,
                    tp_rank=tp_rank,
                    shares={axis.value: (s.start, s.stop) for axis, s in shares.items()},
                    parameter_bytes=held * precision.parameter_bytes,
                    sent_sharded_bytes=(owned if meets else alone) * precision.gradient_bytes,
                    sent_replicated_bytes=(
                        shared * precision.gradient_bytes if shares_replicated else 0
                    ),
                    speed=cell.speed(tp_rank),
                    time_over_ideal=rank_time(plan.model, cell, tp_rank, plan.stages)
                    * plan.micro_batches[cell.replica]
                    / ideal,
                )
            )
    return reports


def report_dict(plan: Plan, precision: Precision) -> dict[str, Any]:
    """The plan with what follows from it, as plain data for ``uneven-tp plan --json``."""
    return {
        "plan": plan.to_dict(),
        "digest": plan.digest,
        "world_size": plan.world_size,
        "parameters": parameter_count(plan),
        "sync_groups": [asdict(group) for group in plan.sync_groups],
        "ranks": [asdict(report) for report in rank_reports(plan, precision)],
    }


def _elements(plan: Plan, stage: int) -> tuple[dict[Axis, int], int]:
    """Elements per unit of each axis, and of the replicated parameters, in a stage."""
    per_unit, replicated = dict.fromkeys(Axis, 0), 0
    for parameter in parameters(plan.model, plan.vocab_size, plan.layers(stage)):
        if parameter.cut is None:
            replicated += parameter.elements()
        else:
            per_unit[parameter.cut.axis] += parameter.elements(units=1)
    return per_unit, replicated


def _held_vocab_rows(cell: Cell) -> int:
    boundaries = cell.shares[Axis.VOCAB]
    return boundaries[1] - boundaries[0]
