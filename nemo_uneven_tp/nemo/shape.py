"""The shape of a model from NeMo's ``GPTConfig`` (or anything with its fields)."""

from __future__ import annotations

from typing import Any

from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.model_shape import ModelShape


def model_shape(config: Any, tokenizer_vocab_size: int | None) -> ModelShape:
    """Read the shape off ``config``.

    Args:
        tokenizer_vocab_size: used unless ``config.vocab_size`` is preset.

    Raises:
        UserError: if neither gives the vocabulary.
    """
    preset = getattr(config, "vocab_size", None)
    vocab_size = preset if preset is not None else tokenizer_vocab_size
    if vocab_size is None:
        raise UserError(
            "model.vocab_size is not set and there is no tokenizer; set model.vocab_size or give "
            "the data a tokenizer"
        )
    if tokenizer_vocab_size is not None and vocab_size < tokenizer_vocab_size:
        raise UserError(
            f"model.config.vocab_size={vocab_size} is less than the {tokenizer_vocab_size} tokens "
            "of the data's tokenizer; set it to at least that, or to None to have it padded"
        )
    heads = config.num_attention_heads
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=heads,
        num_query_groups=config.num_query_groups or heads,
        kv_channels=config.kv_channels or config.hidden_size // heads,
        ffn_hidden_size=config.ffn_hidden_size or 4 * config.hidden_size,
        vocab_size=vocab_size,
        seq_length=config.seq_length,
        gated_linear_unit=config.gated_linear_unit,
        add_bias_linear=config.add_bias_linear,
        add_qkv_bias=config.add_qkv_bias,
        normalization=config.normalization,
        position_embedding_type=config.position_embedding_type,
        share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
        make_vocab_size_divisible_by=config.make_vocab_size_divisible_by,
        should_pad_vocab=preset is None,
        qk_layernorm=config.qk_layernorm,
    )
