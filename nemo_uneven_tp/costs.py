"""What the parts of a layer cost a rank in arithmetic (pure).

Matrix products cost 2 x rows x columns; attention 2 x 2 x seq_length x width for scores and
values, halved by causality (the count of arXiv 2205.05198, appendix A). Backward costs twice
the forward for every rank, so it does not change proportions.

The ranks of a cell meet after every part (an all-reduce, or a reduce-scatter), so a cell's
time is the sum over parts of its slowest rank's. With several pipeline stages, a cell's and a
rank's numbers are those of its stage.
"""

from __future__ import annotations

from enum import StrEnum

from nemo_uneven_tp.model_shape import ModelShape
from nemo_uneven_tp.plan import Cell
from nemo_uneven_tp.shares import Axis


class Part(StrEnum):
    """The parts of the model that meet at their ends."""

    ATTENTION = "attention"
    MLP = "mlp"
    OUTPUT = "output"


def part_flops_per_token(model: ModelShape, cell: Cell, tp_rank: int) -> dict[Part, float]:
    """Forward FLOPs per token of one rank in one layer's parts, and in the output layer."""
    groups = len(cell.share(Axis.QUERY_GROUP, tp_rank))
    return {
        Part.ATTENTION: attention_flops(model, groups * model.heads_per_group, groups),
        Part.MLP: mlp_flops(model, len(cell.share(Axis.FFN, tp_rank))),
        Part.OUTPUT: output_flops(model, cell.shares[Axis.VOCAB][1]),
    }


def attention_flops(model: ModelShape, heads: int, groups: int) -> float:
    """One layer's attention with ``heads`` query heads and keys and values of ``groups``."""
    projections = (2 * heads + 2 * groups) * model.kv_channels
    scores = 2 * model.seq_length * heads * model.kv_channels
    return 2 * model.hidden_size * projections + scores


def mlp_flops(model: ModelShape, columns: int) -> float:
    """One layer's MLP with ``columns`` of the inner width."""
    return 2 * model.hidden_size * columns * (3 if model.gated_linear_unit else 2)


def output_flops(model: ModelShape, rows: int) -> float:
    """The output layer with ``rows`` of the vocabulary. The embedding is a look-up: nothing."""
    return 2 * model.hidden_size * rows


def model_flops_per_token(model: ModelShape, vocab_size: int) -> float:
    """Forward FLOPs per token of the whole model (``vocab_size`` rows, padded)."""
    attention = attention_flops(model, model.num_attention_heads, model.num_query_groups)
    mlp = mlp_flops(model, model.ffn_hidden_size)
    return model.num_layers * (attention + mlp) + output_flops(model, vocab_size)


def rank_flops_per_token(model: ModelShape, cell: Cell, tp_rank: int, stages: int = 1) -> float:
    """Forward FLOPs per token of one rank: its matrix products and its attention scores."""
    parts = part_flops_per_token(model, cell, tp_rank)
    return sum(flops * _times(model, part, cell, stages) for part, flops in parts.items())


def rank_time(model: ModelShape, cell: Cell, tp_rank: int, stages: int = 1) -> float:
    """FLOPs per token of a rank over its speed: its compute time, in FLOPs of a healthy rank."""
    return rank_flops_per_token(model, cell, tp_rank, stages) / cell.speed(tp_rank)


def cell_time(model: ModelShape, cell: Cell, stages: int = 1) -> float:
    """Compute time per token of a cell, in FLOPs of a healthy rank."""
    ranks = [part_flops_per_token(model, cell, i) for i in range(cell.degree)]
    return sum(
        _times(model, part, cell, stages)
        * max(parts[part] / cell.speed(i) for i, parts in enumerate(ranks))
        for part in Part
    )


def _times(model: ModelShape, part: Part, cell: Cell, stages: int) -> int:
    if part is Part.OUTPUT:
        return int(cell.stage == stages - 1)
    return model.num_layers // stages
