"""Uneven layer specs: stock Megatron modules built from a rank-local config.

A rank with ``u`` of an axis's units in a cell of degree ``t`` hands the stock module a copy
of the config in which the axis has ``u * t`` units. The stock code divides by ``t`` and gets
``u``. Tensors of hidden size are untouched, so the stock collectives inside the cell stay
right (design section 2.1). The same subclasses serve the local and the Transformer Engine
specs, since both take the sizes from the config.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_uneven_tp.checkpoint.segments import save_by_segments
from nemo_uneven_tp.errors import UnsupportedError
from nemo_uneven_tp.initial_weights import InitMethod, ReferenceInit, unwrap
from nemo_uneven_tp.model_shape import Parameter, parameters
from nemo_uneven_tp.parallel_state import get_state
from nemo_uneven_tp.sequence_padding import pad_sequence
from nemo_uneven_tp.shares import Axis


class UnevenSelfAttention(SelfAttention):
    """Self-attention over this rank's own query groups."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(localized_attention_config(config), *args, **kwargs)


class UnevenMLP(MLP):
    """MLP over this rank's own columns of the inner width."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("is_expert", False):
            raise UnsupportedError("expert MLPs are not supported by uneven tensor parallelism")
        kwargs.pop("ffn_hidden_size", None)
        super().__init__(localized_mlp_config(config), *args, **kwargs)


def localized_attention_config(config: TransformerConfig) -> TransformerConfig:
    """A copy of ``config`` whose heads, divided by the cell's degree, are this rank's."""
    state = get_state()
    groups = len(state.cell.share(Axis.QUERY_GROUP, state.tp_rank)) * state.cell.degree
    local = copy.copy(config)
    local.kv_channels = state.plan.model.kv_channels
    local.num_query_groups = groups
    local.num_attention_heads = groups * state.plan.model.heads_per_group
    local.init_method = _reference_init("linear_qkv", config.init_method)
    local.output_layer_init_method = _reference_init("linear_proj", config.output_layer_init_method)
    return local


def localized_mlp_config(config: TransformerConfig) -> TransformerConfig:
    """A copy of ``config`` whose FFN width, divided by the cell's degree, is this rank's."""
    state = get_state()
    local = copy.copy(config)
    local.ffn_hidden_size = len(state.cell.share(Axis.FFN, state.tp_rank)) * state.cell.degree
    local.init_method = _reference_init("linear_fc1", config.init_method)
    local.output_layer_init_method = _reference_init("linear_fc2", config.output_layer_init_method)
    return local


def uneven_layer_spec(spec: ModuleSpec) -> ModuleSpec:
    """A copy of a stock GPT layer spec (local or Transformer Engine) with uneven modules.

    Raises:
        UnsupportedError: for layers that are not plain self-attention plus a dense MLP.
    """
    spec = copy.deepcopy(spec)
    submodules = spec.submodules
    attention, mlp = submodules.self_attention, submodules.mlp
    if attention.module is not SelfAttention:
        raise UnsupportedError(
            f"attention of type {attention.module.__name__} is not supported by uneven tensor "
            "parallelism; use plain self-attention or uneven_tp=off"
        )
    if mlp.module is not MLP:
        raise UnsupportedError(
            f"an MLP of type {mlp.module.__name__} (mixture of experts or fused) is not supported "
            "by uneven tensor parallelism; use the dense MLP or uneven_tp=off"
        )
    attention.module = UnevenSelfAttention
    mlp.module = UnevenMLP
    return spec


def local_vocab_size() -> int:
    """The vocabulary size to build this rank's ``GPTModel`` with: the cell's, dummies included."""
    state = get_state()
    return state.cell.shares[Axis.VOCAB][1] * state.cell.degree


def localized_model_config(config: TransformerConfig) -> TransformerConfig:
    """A copy of ``config`` for ``GPTModel`` itself: degree, vocabulary init.

    ``sequence_parallel`` stays on only in cells of more than one rank.
    """
    local = copy.copy(config)
    localize_model_config(local)
    return local


def localize_model_config(config: TransformerConfig) -> None:
    """Like :func:`localized_model_config`, in place (NeMo keeps one config object)."""
    state = get_state()
    config.tensor_model_parallel_size = state.cell.degree
    if config.microbatch_group_size_per_vp_stage == config.pipeline_model_parallel_size:
        config.microbatch_group_size_per_vp_stage = state.plan.stages  # Megatron's default
    config.pipeline_model_parallel_size = state.plan.stages
    config.virtual_pipeline_model_parallel_size = state.plan.virtual_pipeline_model_parallel_size
    config.sequence_parallel = state.plan.sequence_parallel and state.cell.degree > 1
    if hasattr(config, "embedding_init_method"):
        config.embedding_init_method = _reference_init(
            "word_embeddings", unwrap(config.embedding_init_method)
        )
    config.init_method = _reference_init("word_embeddings", unwrap(config.init_method))


def mask_dummy_vocab(model: GPTModel) -> None:
    """Set the logits of this cell's dummy vocabulary rows to the dtype's minimum.

    Then the softmax is the same in every replica and the dummies get no gradient.
    """
    if not model.post_process:
        return
    state = get_state()
    boundaries = state.cell.shares[Axis.VOCAB]
    rows, valid = boundaries[1], len(state.cell.share(Axis.VOCAB, state.tp_rank))
    if valid == rows:
        return

    def mask(module: torch.nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> Any:
        logits, bias = output
        logits[..., valid:] = torch.finfo(logits.dtype).min
        return logits, bias

    model.output_layer.register_forward_hook(mask)


def build_gpt_model(
    config: TransformerConfig, spec: ModuleSpec, chunk: int | None = None, **kwargs: Any
) -> GPTModel:
    """``GPTModel`` of this rank's pipeline stage.

    Args:
        chunk: which model chunk, where stages hold several (virtual stages).
        kwargs: ``GPTModel``'s, without ``vocab_size``.
    """
    state = get_state()
    stages, stage = state.plan.stages, state.cell.stage
    last = (state.plan.virtual_pipeline_model_parallel_size or 1) - 1
    model = GPTModel(
        localized_model_config(config),
        transformer_layer_spec=uneven_layer_spec(spec),
        vocab_size=local_vocab_size(),
        pre_process=stage == 0 and chunk in (None, 0),
        post_process=stage == stages - 1 and chunk in (None, last),
        vp_stage=chunk,
        **kwargs,
    )
    mask_dummy_vocab(model)
    pad_sequence(model)
    save_by_segments(model)
    return model


def _reference_init(module: str, original: InitMethod | None) -> InitMethod:
    state = get_state()
    plan = state.plan
    parameter = _weight(module)
    assert parameter.cut is not None
    assert original is not None
    return ReferenceInit(
        unwrap(original),
        parameter,
        state.cell.share(parameter.cut.axis, state.tp_rank),
        state.cell.degree,
        state.tp_rank,
        plan.reference_tensor_parallel_size,
    )


def _weight(module: str) -> Parameter:
    plan = get_state().plan
    found = (
        p for p in parameters(plan.model, plan.vocab_size) if p.name.endswith(f"{module}.weight")
    )
    return next(found)
