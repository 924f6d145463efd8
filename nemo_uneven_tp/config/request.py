"""Checked configuration -> what the planner is asked for.

No torch and no NeMo, except for ``recipe``: only NeMo can build one of its recipes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nemo_uneven_tp.config.validate import Config
from nemo_uneven_tp.config.vocabulary import tokenizer_vocab_size
from nemo_uneven_tp.errors import UnsupportedError, UserError
from nemo_uneven_tp.layout_options import LayoutOptions
from nemo_uneven_tp.model_shape import ModelShape
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.planner import PlanRequest, make_plan, stock_layout_exists


def plan_of(config: Config) -> Plan:
    """The plan of a run.

    Raises:
        UserError: if the request can't be planned, or, with ``uneven_tp=off``, if stock
            Megatron can't build the model at the nominal degree.
    """
    request = plan_request(config)
    plan = make_plan(request)
    degree = request.tensor_model_parallel_size
    if not config["uneven_tp"]["enabled"] and not stock_layout_exists(request.model, degree):
        raise UserError(
            f"strategy.tensor_model_parallel_size={degree} does not divide the model's heads, "
            "query groups, FFN width or vocabulary, which stock Megatron (uneven_tp=off) needs; "
            "change the degree or use uneven_tp=on"
        )
    return plan


def refuse_stages(plan: Plan) -> None:
    """Stages can be planned, but not run yet.

    Raises:
        UnsupportedError: for a plan with several pipeline stages.
    """
    if plan.stages > 1:
        raise UnsupportedError(
            f"strategy.pipeline_model_parallel_size={plan.stages}: pipeline parallelism can be "
            "planned but not run yet; set it to 1"
        )


def plan_request(config: Config) -> PlanRequest:
    """Read the planner's request out of a checked configuration.

    Raises:
        UserError: if a size can't be worked out.
    """
    if "recipe" in config:
        sys.stderr.write("Building the recipe with NeMo, which takes about 20 s to import ...\n")
        sys.stderr.flush()
        with hidden_standard_error():
            from nemo_uneven_tp.nemo.recipe import shape_and_request_from_recipe

        return shape_and_request_from_recipe(config)
    trainer, strategy, uneven_tp = config["trainer"], config["strategy"], config["uneven_tp"]
    return PlanRequest(
        model=model_shape(config["model"], config["data"]["tokenizer"]),
        tensor_model_parallel_size=strategy["tensor_model_parallel_size"],
        pipeline_model_parallel_size=strategy["pipeline_model_parallel_size"],
        virtual_pipeline_model_parallel_size=strategy["virtual_pipeline_model_parallel_size"],
        context_parallel_size=strategy["context_parallel_size"],
        world_size=trainer["devices"] * trainer["num_nodes"],
        global_batch_size=config["data"]["global_batch_size"],
        micro_batch_size=config["data"]["micro_batch_size"],
        failed_ranks=tuple(uneven_tp["failed_ranks"]),
        degrees=None if uneven_tp["degrees"] is None else tuple(uneven_tp["degrees"]),
        allow_dropped_replicas=uneven_tp["allow_dropped_replicas"],
        reference_tensor_parallel_size=config["model"]["reference_tensor_parallel_size"],
        sequence_parallel=strategy["sequence_parallel"],
        options=LayoutOptions.of(uneven_tp),
    )


@contextmanager
def hidden_standard_error() -> Iterator[None]:
    """Keep what libraries write to stderr while they are imported off it, unless one fails."""
    sys.stderr.flush()
    console = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(console, said.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(console, 2)
            os.close(console)


def model_shape(model: dict[str, Any], tokenizer: str) -> ModelShape:
    """The shape ``model`` describes, with Megatron's defaults for what it leaves out.

    ``model.vocab_size``, NeMo's preset, is taken as it is; otherwise the vocabulary is the
    tokenizer's and padded as stock NeMo pads it.

    Raises:
        UserError: if ``kv_channels`` is left out and heads don't divide ``hidden_size``.
    """
    heads, hidden = model["num_attention_heads"], model["hidden_size"]
    kv_channels = model["kv_channels"]
    if kv_channels is None:
        if heads < 1 or hidden % heads:
            raise UserError(
                f"model.hidden_size={hidden} is not a multiple of model.num_attention_heads={heads}"
                "; change one of them or set model.kv_channels"
            )
        kv_channels = hidden // heads
    groups, ffn, preset = model["num_query_groups"], model["ffn_hidden_size"], model["vocab_size"]
    # Other tokenizers take time to load: a run compares theirs when it has them.
    tokens = tokenizer_vocab_size(tokenizer) if preset is None or tokenizer == "byte" else 0
    if preset is not None and preset < tokens:
        raise UserError(
            f"model.vocab_size={preset} is less than the {tokens} tokens of "
            f"data.tokenizer={tokenizer}; set it to at least that, or to null to have it padded"
        )
    if model["position_embedding_type"] == "rope" and kv_channels % 2:
        raise UserError(
            f"model.kv_channels={kv_channels} is odd, but model.position_embedding_type=rope turns "
            "pairs of channels; make it even"
        )
    return ModelShape(
        num_layers=model["num_layers"],
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads if groups is None else groups,
        kv_channels=kv_channels,
        ffn_hidden_size=4 * hidden if ffn is None else ffn,
        vocab_size=tokens if preset is None else preset,
        should_pad_vocab=preset is None,
        seq_length=model["seq_length"],
        gated_linear_unit=model["gated_linear_unit"],
        add_bias_linear=model["add_bias_linear"],
        add_qkv_bias=model["add_qkv_bias"],
        normalization=model["normalization"],
        position_embedding_type=model["position_embedding_type"],
        share_embeddings_and_output_weights=model["share_embeddings_and_output_weights"],
        make_vocab_size_divisible_by=model["make_vocab_size_divisible_by"],
        qk_layernorm=model["qk_layernorm"],
    )
