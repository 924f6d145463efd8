"""From what the user asks for to a :class:`~nemo_uneven_tp.plan.Plan` (pure).

:func:`make_plan` checks the request, finds the living replicas, gives every rank its share
of each axis, and splits the micro-batches over replicas in proportion to what the slowest
stage of each can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_uneven_tp.costs import cell_time
from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.layout_options import LayoutOptions
from nemo_uneven_tp.model_shape import ModelShape
from nemo_uneven_tp.plan import Cell, Plan
from nemo_uneven_tp.shares import (
    Axis,
    Boundaries,
    block_boundaries,
    largest_remainder,
    weighted_boundaries,
)
from nemo_uneven_tp.speeds import cell_speeds, speed_table
from nemo_uneven_tp.topology import Degrees, Topology, make_topology


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a job asks for. ``world_size`` is nominal: failed ranks are counted in."""

    model: ModelShape
    tensor_model_parallel_size: int
    world_size: int
    global_batch_size: int
    micro_batch_size: int
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    failed_ranks: Sequence[int] = ()
    degrees: Degrees | None = None
    allow_dropped_replicas: bool = False
    reference_tensor_parallel_size: int | None = None
    sequence_parallel: bool = False
    options: LayoutOptions = LayoutOptions()
    virtual_pipeline_model_parallel_size: int | None = None


def make_plan(request: PlanRequest) -> Plan:
    """Make the plan of ``request``; deterministic, the same on every rank.

    Raises:
        UserError: naming the configuration key, its value, what is allowed and what to do.
    """
    model = request.model
    _check_model(model)
    topology = make_topology(
        tensor_model_parallel_size=request.tensor_model_parallel_size,
        world_size=request.world_size,
        pipeline_model_parallel_size=request.pipeline_model_parallel_size,
        context_parallel_size=request.context_parallel_size,
        failed_ranks=request.failed_ranks,
        degrees=request.degrees,
        allow_dropped_replicas=request.allow_dropped_replicas,
    )
    sequence_parallel = request.sequence_parallel and request.tensor_model_parallel_size > 1
    _check_stages(request)
    for degree in _degrees(topology):
        _check_degree(model, degree)
    reference = _reference_degree(
        model, request.reference_tensor_parallel_size, request.tensor_model_parallel_size
    )
    vocab_size = model.padded_vocab_size(reference)
    table = speed_table(request.options.rank_speeds, request.world_size)
    cells = _cells(model, topology, vocab_size, table)
    return Plan(
        model=model,
        tensor_model_parallel_size=request.tensor_model_parallel_size,
        nominal_world_size=request.world_size,
        failed_ranks=topology.failed_ranks,
        dropped_replicas=topology.dropped_replicas,
        cells=cells,
        vocab_size=vocab_size,
        reference_tensor_parallel_size=reference,
        micro_batch_size=request.micro_batch_size,
        global_batch_size=request.global_batch_size,
        micro_batches=_split_batch(request, cells, vocab_size),
        sequence_parallel=sequence_parallel,
        pipeline_model_parallel_size=request.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=request.virtual_pipeline_model_parallel_size,
    )


def stock_layout_exists(model: ModelShape, degree: int) -> bool:
    """Whether stock Megatron can build the model at this tensor-parallel degree."""
    whole = (
        model.num_query_groups % degree == 0
        and model.num_attention_heads % degree == 0
        and model.ffn_hidden_size % degree == 0
    )
    return whole and model.padded_vocab_size(degree) % degree == 0


def share_boundaries(
    model: ModelShape, degree: int, vocab_size: int, speeds: Sequence[float] = ()
) -> dict[Axis, Boundaries]:
    """Share boundaries of each axis in a cell of ``degree`` ranks.

    In proportion to ``speeds`` if there are any; the vocabulary is even all the same.
    """
    weights = speeds or (1.0,) * degree
    return {
        Axis.QUERY_GROUP: weighted_boundaries(model.num_query_groups, weights, minimum=1),
        Axis.FFN: weighted_boundaries(model.ffn_hidden_size, weights, minimum=1),
        Axis.VOCAB: block_boundaries(vocab_size, degree),
    }


def _cells(
    model: ModelShape, topology: Topology, vocab_size: int, table: Mapping[int, float]
) -> tuple[Cell, ...]:
    shares_of: dict[tuple[int, tuple[float, ...]], dict[Axis, Boundaries]] = {}
    cells, next_rank = [], 0
    for stage in range(len(topology.cells[0])):
        for replica, nominal_replica in enumerate(topology.nominal_replicas):
            nominal_ranks = topology.cells[replica][stage]
            degree = len(nominal_ranks)
            speeds = cell_speeds(table, nominal_ranks)
            kind = (degree, speeds)
            if kind not in shares_of:
                shares_of[kind] = share_boundaries(model, degree, vocab_size, speeds)
            cells.append(
                Cell(
                    replica=replica,
                    nominal_replica=nominal_replica,
                    stage=stage,
                    ranks=tuple(range(next_rank, next_rank + degree)),
                    nominal_ranks=nominal_ranks,
                    shares=shares_of[kind],
                    speeds=speeds,
                )
            )
            next_rank += degree
    return tuple(cells)


def _degrees(topology: Topology) -> list[int]:
    """The distinct degrees of all cells."""
    return sorted({len(ranks) for stages in topology.cells for ranks in stages})


def _split_batch(request: PlanRequest, cells: Sequence[Cell], vocab_size: int) -> tuple[int, ...]:
    micro, whole = request.micro_batch_size, request.global_batch_size
    for key, value in (("data.micro_batch_size", micro), ("data.global_batch_size", whole)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{key}={value} must be an integer of at least 1")
    if whole % micro:
        raise UserError(
            f"data.global_batch_size={whole} is not a multiple of data.micro_batch_size={micro}; "
            "change one of them"
        )
    total = whole // micro
    stages = request.pipeline_model_parallel_size
    replicas = len(cells) // stages
    if total < replicas:
        raise UserError(
            f"data.global_batch_size={whole} makes {total} micro-batches of "
            f"data.micro_batch_size={micro}, too few for {replicas} replicas to get one each; "
            "make the global batch larger or the micro-batch smaller"
        )
    # The interleaved schedule takes micro-batches in rounds of as many as there are stages.
    round_ = stages if request.virtual_pipeline_model_parallel_size is not None else 1
    if total % round_ or total < replicas * round_:
        raise UserError(
            f"data.global_batch_size={whole} makes {total} micro-batches of "
            f"data.micro_batch_size={micro}; with virtual stages every replica needs a multiple of "
            f"strategy.pipeline_model_parallel_size={stages}, so make it a multiple of {stages} "
            f"and at least {replicas * round_}"
        )
    times: dict[tuple[int, int, tuple[float, ...]], float] = {}
    slowest = [0.0] * replicas
    for cell in cells:
        kind = (cell.stage, cell.degree, cell.speeds)
        if kind not in times:
            times[kind] = cell_time(request.model, cell, stages)
        slowest[cell.replica] = max(slowest[cell.replica], times[kind])
    rounds = largest_remainder(total // round_, [1.0 / time for time in slowest], minimum=1)
    return tuple(round_ * count for count in rounds)


def _reference_degree(model: ModelShape, asked: int | None, nominal: int) -> int:
    if asked is None:
        return nominal if stock_layout_exists(model, nominal) else 1
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise UserError(
            f"model.reference_tensor_parallel_size={asked} must be an integer of at least 1"
        )
    if not stock_layout_exists(model, asked):
        raise UserError(
            f"model.reference_tensor_parallel_size={asked} is a layout stock Megatron can't build: "
            f"it must divide model.num_query_groups={model.num_query_groups}, "
            f"model.num_attention_heads={model.num_attention_heads} and "
            f"model.ffn_hidden_size={model.ffn_hidden_size}; 1 always works"
        )
    return asked


def _check_stages(request: PlanRequest) -> None:
    stages = request.pipeline_model_parallel_size
    chunks = request.virtual_pipeline_model_parallel_size
    if chunks is not None:
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise UserError(
                f"strategy.virtual_pipeline_model_parallel_size={chunks} must be an integer of at "
                "least 1, or null"
            )
        if stages == 1:
            raise UserError(
                f"strategy.virtual_pipeline_model_parallel_size={chunks} needs "
                "strategy.pipeline_model_parallel_size of at least 2; set it to null"
            )
    parts = stages * (chunks or 1)
    if request.model.num_layers % parts:
        what = f"strategy.pipeline_model_parallel_size={stages}"
        if chunks is not None:
            what += f" x strategy.virtual_pipeline_model_parallel_size={chunks}"
        raise UserError(
            f"model.num_layers={request.model.num_layers} is not a multiple of {what}; every stage "
            "needs equally many layers, so change one of them"
        )


def _check_degree(model: ModelShape, degree: int) -> None:
    if degree > model.num_query_groups:
        raise UserError(
            f"model.num_query_groups={model.num_query_groups} is less than the {degree} "
            "tensor-parallel ranks of a replica; each rank needs at least one query group, so "
            "lower strategy.tensor_model_parallel_size or uneven_tp.degrees"
        )
    if degree > model.ffn_hidden_size:
        raise UserError(
            f"model.ffn_hidden_size={model.ffn_hidden_size} is less than the {degree} "
            "tensor-parallel ranks of a replica; make it at least as large as the degree"
        )


def _check_model(model: ModelShape) -> None:
    sizes = (
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "ffn_hidden_size",
        "vocab_size",
        "seq_length",
        "make_vocab_size_divisible_by",
    )
    for name in sizes:
        value = getattr(model, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"model.{name}={value} must be an integer of at least 1")
    if model.num_attention_heads % model.num_query_groups:
        raise UserError(
            f"model.num_attention_heads={model.num_attention_heads} is not a multiple of "
            f"model.num_query_groups={model.num_query_groups}; every query group needs equally "
            "many heads"
        )
