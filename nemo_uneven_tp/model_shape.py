"""The shape of a dense GPT and the inventory of its parameters (pure).

Field names are Megatron's and NeMo's. The inventory says, for every parameter, its
global shape in the stock layout and how tensor parallelism cuts it. The planner counts
bytes from it; the Megatron layer uses :func:`cut_of` to find segments in real tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from nemo_uneven_tp.shares import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayers:
    """What one pipeline stage holds: numbers of its layers, embedding (first), output (last)."""

    layers: tuple[int, ...]
    first: bool
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a dense GPT, named as in NeMo's ``GPTConfig``.

    ``vocab_size`` is the tokenizer's size when ``should_pad_vocab`` is true, and NeMo's
    preset (already padded) ``GPTConfig.vocab_size`` when it is false.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int
    vocab_size: int
    seq_length: int
    num_query_groups: int
    kv_channels: int
    gated_linear_unit: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    normalization: str = "LayerNorm"
    position_embedding_type: str = "learned_absolute"
    share_embeddings_and_output_weights: bool = True
    make_vocab_size_divisible_by: int = 128
    should_pad_vocab: bool = True
    qk_layernorm: bool = False

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key and one value head."""
        return self.num_attention_heads // self.num_query_groups

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Rows of the vocabulary that the stock run at this degree holds.

        Stock NeMo pads to a multiple of ``make_vocab_size_divisible_by *
        tensor_model_parallel_size`` unless ``GPTConfig.vocab_size`` is preset.
        """
        if not self.should_pad_vocab:
            return self.vocab_size
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple

    def stage_layers(self, stage: int, stages: int, chunks: int = 1) -> StageLayers:
        """What stage ``stage`` of ``stages`` holds, cut as stock Megatron cuts.

        Args:
            chunks: virtual stages (model chunks) per stage; chunk c of all stages comes before
                chunk c + 1 of the first.
        """
        each = self.num_layers // (stages * chunks)
        starts = [(chunk * stages + stage) * each for chunk in range(chunks)]
        return StageLayers(
            layers=tuple(layer for start in starts for layer in range(start, start + each)),
            first=stage == 0,
            last=stage == stages - 1,
        )

    def units(self, axis: Axis, padded_vocab_size: int) -> int:
        """How many units ``axis`` has."""
        return {
            Axis.QUERY_GROUP: self.num_query_groups,
            Axis.FFN: self.ffn_hidden_size,
            Axis.VOCAB: padded_vocab_size,
        }[axis]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a parameter lies along a sharded axis.

    A rank with ``n`` units holds ``runs`` consecutive blocks of ``n * per_unit`` indices
    along dimension ``dim``: one block, or two for a gated ``linear_fc1``, which stores
    ``[gate; up]`` per rank.
    """

    axis: Axis
    dim: int
    per_unit: int
    runs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of the model: Megatron's name, global shape, cut (``None``: replicated)."""

    name: str
    shape: tuple[int, ...]
    cut: Cut | None

    def elements(self, units: int | None = None) -> int:
        """Elements held by a rank with ``units`` units of the axis (all of them if replicated)."""
        if self.cut is None or units is None:
            return prod(self.shape)
        along = self.cut.runs * self.cut.per_unit * units
        return along * prod(n for dim, n in enumerate(self.shape) if dim != self.cut.dim)


def cut_of(name: str, shape: ModelShape) -> Cut | None:
    """The cut of the parameter called ``name`` in Megatron's GPT (``None``: replicated).

    ``name`` may carry any prefix (``module.``, ``decoder.layers.3.``). The layer norm weights
    that Transformer Engine fuses into ``linear_qkv`` and ``linear_fc1`` are replicated.
    """
    *_, module, leaf = ("", "", *name.split("."))
    if leaf not in ("weight", "bias"):
        return None
    group_rows = (shape.heads_per_group + 2) * shape.kv_channels
    if module == "linear_qkv":
        return Cut(axis=Axis.QUERY_GROUP, dim=0, per_unit=group_rows)
    if module == "linear_fc1":
        return Cut(axis=Axis.FFN, dim=0, per_unit=1, runs=2 if shape.gated_linear_unit else 1)
    if module in ("word_embeddings", "output_layer"):
        return Cut(axis=Axis.VOCAB, dim=0, per_unit=1)
    if leaf == "weight" and module == "linear_proj":
        per_group = shape.heads_per_group * shape.kv_channels
        return Cut(axis=Axis.QUERY_GROUP, dim=1, per_unit=per_group)
    if leaf == "weight" and module == "linear_fc2":
        return Cut(axis=Axis.FFN, dim=1, per_unit=1)
    return None


def parameters(
    shape: ModelShape, padded_vocab_size: int, stage: StageLayers | None = None
) -> Iterator[Parameter]:
    """Every parameter of the model, in Megatron's order (local layer spec names).

    Args:
        stage: only what this pipeline stage holds. Layers keep their number in the model; the
            last stage has an output layer of its own, tied to the embedding or not.
    """
    if stage is None:
        stage = shape.stage_layers(0, 1)
    hidden = shape.hidden_size
    qkv_rows = shape.num_query_groups * (shape.heads_per_group + 2) * shape.kv_channels
    projected = shape.num_attention_heads * shape.kv_channels
    fc1_rows = shape.ffn_hidden_size * (2 if shape.gated_linear_unit else 1)

    def named(name: str, *size: int) -> Parameter:
        return Parameter(name=name, shape=size, cut=cut_of(name, shape))

    def norm(name: str, size: int = hidden) -> Iterator[Parameter]:
        yield named(f"{name}.weight", size)
        if shape.normalization == "LayerNorm":
            yield named(f"{name}.bias", size)

    if stage.first:
        yield named("embedding.word_embeddings.weight", padded_vocab_size, hidden)
        if shape.position_embedding_type == "learned_absolute":
            yield named("embedding.position_embeddings.weight", shape.seq_length, hidden)
    for layer in stage.layers:
        prefix = f"decoder.layers.{layer}"
        yield from norm(f"{prefix}.input_layernorm")
        yield named(f"{prefix}.self_attention.linear_proj.weight", hidden, projected)
        if shape.add_bias_linear:
            yield named(f"{prefix}.self_attention.linear_proj.bias", hidden)
        yield named(f"{prefix}.self_attention.linear_qkv.weight", qkv_rows, hidden)
        if shape.add_bias_linear or shape.add_qkv_bias:
            yield named(f"{prefix}.self_attention.linear_qkv.bias", qkv_rows)
        if shape.qk_layernorm:
            yield from norm(f"{prefix}.self_attention.q_layernorm", shape.kv_channels)
            yield from norm(f"{prefix}.self_attention.k_layernorm", shape.kv_channels)
        yield from norm(f"{prefix}.pre_mlp_layernorm")
        yield named(f"{prefix}.mlp.linear_fc1.weight", fc1_rows, hidden)
        if shape.add_bias_linear:
            yield named(f"{prefix}.mlp.linear_fc1.bias", fc1_rows)
        yield named(f"{prefix}.mlp.linear_fc2.weight", hidden, shape.ffn_hidden_size)
        if shape.add_bias_linear:
            yield named(f"{prefix}.mlp.linear_fc2.bias", hidden)
    if not stage.last:
        return
    yield from norm("decoder.final_layernorm")
    if not shape.share_embeddings_and_output_weights or not stage.first:
        yield named("output_layer.weight", padded_vocab_size, hidden)
