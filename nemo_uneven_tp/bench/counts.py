"""What every rank sends and holds, computed from the plan alone (pure).

The same numbers a real step gives when its collectives and tensors are counted
(:mod:`nemo_uneven_tp.bench.ranks`); a test compares both. Bytes of a collective are its
payload in one pass: the whole input of an all-reduce or reduce-scatter, the whole output of
an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import lcm, prod
from typing import Any

from nemo_uneven_tp.costs import model_flops_per_token, rank_time
from nemo_uneven_tp.model_shape import Parameter, parameters
from nemo_uneven_tp.plan import Cell, Plan
from nemo_uneven_tp.planner import share_boundaries
from nemo_uneven_tp.shares import Axis

Ranks = tuple[int, ...]

DEFAULT_BUCKET_SIZE = 40_000_000
"""Elements; Megatron's own default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What decides bytes besides the plan. Sizes are bytes of one element."""

    parameter_bytes: int
    gradient_bytes: int
    use_distributed_optimizer: bool
    overlap_grad_reduce: bool = False
    bucket_size: int | None = None
    optimizer: str = "adam"

    @property
    def state_bytes(self) -> int:
        """Optimizer state of one element: fp32 main parameter and fp32 moments."""
        return 4 + (8 if self.optimizer == "adam" else 4)

    @property
    def unsharded_state_bytes(self) -> int:
        """As above without the distributed optimizer: fp32 parameters are their own main ones."""
        return self.state_bytes - (4 if self.parameter_bytes == 4 else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCounts:
    """One rank's counts per step, in bytes.

    ``shard_bytes``: gradients of its share and of the replicated parameters.
    ``grad_sync_bytes``: what it hands to collectives between replicas before the optimizer;
    ``param_gather_bytes``: after it. ``cell_broadcast_bytes``: replicated values passed on
    inside the cell. ``optimizer_bytes``: main parameters and moments it holds.
    ``flops_share_over_ideal``: its FLOPs over its speed, against those of the model over the
    speeds of all living ranks.
    """

    rank: int
    nominal_rank: int
    replica: int
    stage: int
    degree: int
    shard_bytes: int
    grad_sync_bytes: int
    grad_sync_calls: int
    param_gather_bytes: int
    param_gather_calls: int
    cell_broadcast_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    staging_bytes: int
    flops_share_over_ideal: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardFirstCounts:
    """The same for the reshard-first scheme, busiest rank each (see ``reshard_first.py``).

    ``grad_sync_bytes_over_shard``: its all-reduce against the rank's own shard.
    ``all_to_all_bytes``: sent to other ranks in both reshards. ``side_buffer_bytes``: memory
    for gradients at the smallest degree.
    """

    grad_sync_bytes_over_shard: float
    all_to_all_bytes: int
    side_buffer_bytes: int


def rank_counts(plan: Plan, settings: Settings) -> list[RankCounts]:
    """Counts of every living rank, in compact order; like ranks are counted once."""
    whole = list(parameters(plan.model, plan.vocab_size))
    buckets = _buckets(plan, whole, settings)
    speeds = sum(cell.speed(i) for cell in plan.cells for i in range(cell.degree))
    ideal = model_flops_per_token(plan.model, plan.vocab_size) * plan.num_micro_batches / speeds
    alike: dict[tuple[Any, int], tuple[dict[str, int], OptimizerBytes]] = {}
    found = []
    for cell in plan.cells:
        for tp_rank, rank in enumerate(cell.ranks):
            kind = (tuple(cell.shares.values()), tp_rank)
            if kind not in alike:
                make = _stock_bytes if plan.is_uniform else _segment_bytes
                alike[kind] = make(plan, settings, whole, buckets, cell, tp_rank)
            counts, optimizer_bytes = alike[kind]
            flops = rank_time(plan.model, cell, tp_rank, plan.stages)
            found.append(
                RankCounts(
                    rank=rank,
                    nominal_rank=cell.nominal_ranks[tp_rank],
                    replica=cell.replica,
                    stage=cell.stage,
                    degree=cell.degree,
                    flops_share_over_ideal=flops * plan.micro_batches[cell.replica] / ideal,
                    optimizer_bytes=optimizer_bytes(cell.replica),
                    **counts,
                )
            )
    return found


def summary(plan: Plan, settings: Settings, ranks: list[RankCounts]) -> dict[str, Any]:
    """The ratios to the bounds, worst rank each, as plain data."""
    ratio = settings.parameter_bytes / settings.gradient_bytes
    bound = settings.state_bytes / settings.gradient_bytes / plan.replicas
    boundaries = {(a, b) for cell in plan.cells for a in Axis for b in cell.shares[a]}
    return {
        "grad_sync_bytes_over_shard": max(r.grad_sync_bytes / r.shard_bytes for r in ranks),
        "param_gather_bytes_over_shard": max(
            r.param_gather_bytes / (r.shard_bytes * ratio) for r in ranks
        ),
        "optimizer_bytes_over_bound": max(
            r.optimizer_bytes / (r.shard_bytes * bound) for r in ranks
        ),
        "flops_share_over_ideal": max(r.flops_share_over_ideal for r in ranks),
        "sync_groups": len(plan.sync_groups),
        "sync_groups_bound": len(boundaries) + min(plan.degrees),
        "ranks": [asdict(r) for r in ranks],
    }


def reshard_first_counts(plan: Plan, settings: Settings) -> ReshardFirstCounts:
    """Counts of the reshard-first scheme with all-reduce, for the same gradients."""
    whole = list(parameters(plan.model, plan.vocab_size))
    smallest = min(plan.degrees)
    target = share_boundaries(plan.model, smallest, plan.vocab_size)
    aside = next(cell for cell in plan.cells if cell.degree == smallest)
    replicated = sum(p.elements() for p in whole if p.cut is None)
    worst = ReshardFirstCounts(
        grad_sync_bytes_over_shard=0.0, all_to_all_bytes=0, side_buffer_bytes=0
    )
    for cell in plan.distinct_cells:
        for tp_rank in range(cell.degree):
            own = sum(p.elements(len(cell.share(p.cut.axis, tp_rank))) for p in whole if p.cut)
            held = kept = 0
            for p in whole:
                if p.cut is None or tp_rank >= smallest:
                    continue
                boundaries = target[p.cut.axis]
                held += p.elements(held_units(aside, p.cut.axis, tp_rank))
                mine = cell.share(p.cut.axis, tp_rank)
                common = min(mine.stop, boundaries[tp_rank + 1]) - max(
                    mine.start, boundaries[tp_rank]
                )
                kept += p.elements(max(common, 0))
            valid = sum(
                p.elements(target[p.cut.axis][tp_rank + 1] - target[p.cut.axis][tp_rank])
                for p in whole
                if p.cut and tp_rank < smallest
            )
            reduced = (held + replicated) * (tp_rank < smallest and plan.replicas > 1)
            moves = cell.degree > smallest
            worst = ReshardFirstCounts(
                grad_sync_bytes_over_shard=max(
                    worst.grad_sync_bytes_over_shard, reduced / (own + replicated)
                ),
                all_to_all_bytes=max(
                    worst.all_to_all_bytes,
                    settings.gradient_bytes * (own - kept + valid - kept) * moves,
                ),
                side_buffer_bytes=max(
                    worst.side_buffer_bytes, settings.gradient_bytes * reduced * moves
                ),
            )
    return worst


def held_units(cell: Cell, axis: Axis, tp_rank: int) -> int:
    """Units of ``axis`` in a rank's tensors: dummy vocabulary rows included."""
    return cell.shares[axis][1] if axis is Axis.VOCAB else len(cell.share(axis, tp_rank))


Bucket = list[Parameter]
OptimizerBytes = Callable[[int], int]
"""Bytes of optimizer state, given the replica."""


def _buckets(plan: Plan, whole: list[Parameter], settings: Settings) -> list[Bucket]:
    """Sharded parameters as :func:`nemo_uneven_tp.buckets.make_buckets` cuts them."""
    limit = settings.bucket_size or DEFAULT_BUCKET_SIZE
    buckets: list[Bucket] = []
    current: Bucket = []
    filled = 0
    for parameter in reversed(whole):
        if parameter.cut is None:
            continue
        if current and filled >= limit:
            buckets.append(current)
            current, filled = [], 0
        current.append(parameter)
        axis = parameter.cut.axis
        filled += parameter.elements(
            max(
                held_units(cell, axis, i)
                for cell in plan.distinct_cells
                for i in range(cell.degree)
            )
        )
    return [*buckets, current]


def _held_bytes(
    settings: Settings, whole: list[Parameter], cell: Cell, tp_rank: int
) -> dict[str, int]:
    cuts = [(p, p.cut) for p in whole if p.cut is not None]
    own = sum(p.elements(len(cell.share(cut.axis, tp_rank))) for p, cut in cuts)
    held = sum(p.elements(held_units(cell, cut.axis, tp_rank)) for p, cut in cuts)
    replicated = sum(p.elements() for p in whole if p.cut is None)
    return {
        "shard_bytes": settings.gradient_bytes * (own + replicated),
        "gradient_bytes": settings.gradient_bytes * (held + replicated),
    }


def _segment_bytes(
    plan: Plan,
    settings: Settings,
    whole: list[Parameter],
    buckets: list[Bucket],
    cell: Cell,
    tp_rank: int,
) -> tuple[dict[str, int], OptimizerBytes]:
    """Replicas differ: packed by sync group, bucket by bucket; replicated parameters apart."""
    counts = _held_bytes(settings, whole, cell, tp_rank)
    replicated = sum(p.elements() for p in whole if p.cut is None)
    packed: list[int] = []
    staged = []
    for bucket in buckets:
        groups = _packed(plan, bucket, cell, tp_rank)
        packed += groups
        staged.append(sum(_padded(n, plan, settings) for n in groups))
    if replicated:
        packed += [replicated] * (tp_rank == 0)
        staged.append(_padded(replicated, plan, settings))
    sent = sum(_padded(n, plan, settings) for n in packed)
    gathers = settings.use_distributed_optimizer
    handed_on = settings.parameter_bytes if gathers else settings.gradient_bytes
    in_cell = staged[-1] if replicated and cell.degree > 1 else 0
    element = max(settings.gradient_bytes, settings.parameter_bytes if gathers else 0)

    def optimizer_bytes(replica: int) -> int:
        if not gathers:
            return (
                settings.unsharded_state_bytes * counts["gradient_bytes"] // settings.gradient_bytes
            )
        return settings.state_bytes * sum(_part(n, plan.replicas, replica) for n in packed)

    return counts | {
        "grad_sync_bytes": settings.gradient_bytes * sent,
        "grad_sync_calls": len(packed),
        "param_gather_bytes": settings.parameter_bytes * sent if gathers else 0,
        "param_gather_calls": len(packed) if gathers else 0,
        "cell_broadcast_bytes": handed_on * in_cell,
        "staging_bytes": element * max(staged),
    }, optimizer_bytes


def _stock_bytes(
    plan: Plan,
    settings: Settings,
    whole: list[Parameter],
    buckets: list[Bucket],
    cell: Cell,
    tp_rank: int,
) -> tuple[dict[str, int], OptimizerBytes]:
    """Replicas are alike: stock Megatron packs whole parameters, padded if it shards them."""
    counts = _held_bytes(settings, whole, cell, tp_rank)
    sharded, meets = settings.use_distributed_optimizer, plan.replicas > 1
    limit = settings.bucket_size or max(DEFAULT_BUCKET_SIZE, 1_000_000 * plan.replicas)
    if not settings.overlap_grad_reduce:
        limit = sum(p.elements() for p in whole) + 1
    filled: list[list[tuple[int, int]]] = [[]]  # per bucket: where its parameters lie
    ends = [0]
    offset = 0
    for p in reversed(whole):
        numel = p.elements(None if p.cut is None else held_units(cell, p.cut.axis, tp_rank))
        start = -(-offset // 64) * 64 if sharded else offset
        offset = start + numel
        filled[-1].append((start, offset))
        if offset - ends[-1] >= limit:
            offset = _bucket_end(offset, plan.replicas, sharded)
            ends.append(offset)
            filled.append([])
    if filled[-1]:
        offset = _bucket_end(offset, plan.replicas, sharded)
        ends.append(offset)
    calls = len(ends) - 1

    def optimizer_bytes(replica: int) -> int:
        if not sharded:
            return settings.unsharded_state_bytes * offset
        elements = 0
        for first, last, intervals in zip(ends, ends[1:], filled, strict=False):
            part = (last - first) // plan.replicas
            low = first + replica * part
            elements += sum(max(min(b, low + part) - max(a, low), 0) for a, b in intervals)
        return settings.unsharded_state_bytes * elements

    return counts | {
        "gradient_bytes": settings.gradient_bytes * offset,
        "grad_sync_bytes": settings.gradient_bytes * offset * meets,
        "grad_sync_calls": calls * meets,
        "param_gather_bytes": settings.parameter_bytes * offset * meets * sharded,
        "param_gather_calls": calls * meets * sharded,
        "cell_broadcast_bytes": 0,
        "staging_bytes": 0,
    }, optimizer_bytes


def _bucket_end(offset: int, replicas: int, sharded: bool) -> int:
    unit = lcm(replicas, 128) if sharded else 1
    return -(-offset // unit) * unit


def _packed(plan: Plan, bucket: Bucket, cell: Cell, tp_rank: int) -> list[int]:
    """Elements a rank packs from ``bucket`` for each of its sync groups."""
    rank, found = cell.ranks[tp_rank], dict[Ranks, int]()
    for parameter in bucket:
        assert parameter.cut is not None
        for segment in plan.segments(parameter.cut.axis, cell.stage):
            if plan.owner(segment, cell) == rank:
                size = parameter.elements(segment.stop - segment.start)
                found[segment.owners] = found.get(segment.owners, 0) + size
    return list(found.values())


def _padded(numel: int, plan: Plan, settings: Settings) -> int:
    unit = plan.replicas if settings.use_distributed_optimizer else 1
    return -(-numel // unit) * unit


def _part(numel: int, members: int, index: int) -> int:
    """Elements of ``numel`` that fall to the member ``index`` of equal, padded parts."""
    length = -(-numel // members)
    return max(min(numel - index * length, length), 0)


def step_flops(plan: Plan) -> float:
    """FLOPs of one training step of all replicas (forward, and twice that backward)."""
    tokens = plan.global_batch_size * plan.model.seq_length
    return 3 * model_flops_per_token(plan.model, plan.vocab_size) * tokens


def model_elements(plan: Plan) -> int:
    """Parameters of the whole model."""
    return sum(prod(p.shape) for p in parameters(plan.model, plan.vocab_size))
