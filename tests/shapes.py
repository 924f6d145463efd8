"""Shapes of well-known models, for tests that only count."""

from __future__ import annotations

from dataclasses import replace

from nemo_uneven_tp.model_shape import ModelShape

LLAMA3_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_query_groups=8,
    kv_channels=128,
    ffn_hidden_size=14336,
    vocab_size=128256,
    seq_length=8192,
    gated_linear_unit=True,
    add_bias_linear=False,
    normalization="RMSNorm",
    position_embedding_type="rope",
    share_embeddings_and_output_weights=False,
)
LLAMA3_70B = replace(
    LLAMA3_8B, num_layers=80, hidden_size=8192, num_attention_heads=64, ffn_hidden_size=28672
)
