"""A trainable model of a configuration on Megatron-Core alone, stock or over a plan.

No NeMo: ``GPTConfig``'s fields are those of Megatron's ``TransformerConfig`` and the
arguments of its ``GPTModel``. Tokens are random; nothing that is counted or timed depends on
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import activations
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as stock_finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_uneven_tp.distributed_data_parallel import UnevenDistributedDataParallel
from nemo_uneven_tp.finalize_grads import finalize_model_grads
from nemo_uneven_tp.layer_specs import build_gpt_model
from nemo_uneven_tp.optimizer import get_uneven_optimizer
from nemo_uneven_tp.plan import Plan

ACTIVATIONS = {
    "gelu": F.gelu,
    "quick_gelu": activations.quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
    "squared_relu": activations.squared_relu,
}
DTYPES = {"32": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_SCHEDULE = ("min_lr", "warmup_steps", "constant_steps")


class Trainee:
    """Model, data parallelism and optimizer of one rank, and a step to take.

    Args:
        config: a checked configuration.
        plan: the plan in force (``initialize_uneven_model_parallel`` has been called).
        stock: whether all parts are Megatron's own.
    """

    def __init__(self, config: dict[str, Any], plan: Plan, replica: int, *, stock: bool) -> None:
        self.plan = plan
        self.micro_batches = plan.micro_batches[replica]
        # Ours is built from the whole model's config and made local by the layer specs.
        self.config = transformer_config(config, plan.cells[replica].degree if stock else 1)
        spec = get_gpt_layer_local_spec(
            qk_layernorm=plan.model.qk_layernorm, normalization=plan.model.normalization
        )
        options = gpt_options(config)
        wrapper: type[DistributedDataParallel] = UnevenDistributedDataParallel
        build, finalize = get_uneven_optimizer, finalize_model_grads
        if stock:
            self.model = GPTModel(self.config, spec, vocab_size=plan.vocab_size, **options)
            wrapper, finalize = DistributedDataParallel, stock_finalize_model_grads
            build = get_megatron_optimizer
        else:
            self.model = build_gpt_model(self.config, spec, **options)
            self.config = self.model.config
        self.config.finalize_model_grads_func = finalize
        narrow = self.config.bf16 or self.config.fp16
        wrapped = Float16Module(self.config, self.model) if narrow else self.model
        self.chunk = wrapper(self.config, ddp_config(config), wrapped)
        self.optimizer = build(optimizer_config(config), [self.chunk])
        self.config.no_sync_func = self.chunk.no_sync
        self.config.grad_scale_func = self.optimizer.scale_loss
        size = (plan.micro_batch_size, plan.model.seq_length + 1)
        self.tokens = torch.randint(0, plan.model.vocab_size, size)

    def step(self) -> None:
        """One whole training step."""
        self.compute()
        self.update()

    def compute(self) -> None:
        """Forward, backward and gradient sync of all micro-batches."""
        sequence = self.plan.model.seq_length
        self.chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter([self.tokens] * self.micro_batches),
            model=self.chunk,
            num_microbatches=self.micro_batches,
            seq_length=sequence,
            micro_batch_size=self.plan.micro_batch_size,
            forward_only=False,
        )

    def update(self) -> None:
        """Optimizer step; parameters are in place everywhere when it returns."""
        self.optimizer.step()
        ddp = self.chunk.ddp_config
        if ddp.use_distributed_optimizer and ddp.overlap_param_gather:
            self.chunk.start_param_sync(force_sync=True)


def _forward_step(tokens: Iterator[torch.Tensor], model: torch.nn.Module) -> Any:
    batch = next(tokens)
    sequence = batch.shape[1] - 1
    positions = torch.arange(sequence)[None].expand(batch.shape[0], sequence)
    causal = torch.triu(torch.ones(1, 1, sequence, sequence, dtype=torch.bool), 1)
    losses = model(batch[:, :-1], positions, causal, labels=batch[:, 1:])
    return losses, partial(_mean_loss, batch.shape[0] * sequence)


def _mean_loss(tokens: int, losses: torch.Tensor) -> Any:
    return losses.float().sum(), torch.tensor(tokens, dtype=torch.int), {}


def transformer_config(config: dict[str, Any], degree: int) -> TransformerConfig:
    """Megatron's model config, with what a machine without GPUs needs."""
    names = {field.name for field in fields(TransformerConfig)}
    values = {name: value for name, value in config["model"].items() if name in names}
    heads = values["num_attention_heads"]
    values["num_query_groups"] = values["num_query_groups"] or heads
    values["activation_func"] = ACTIVATIONS[config["model"]["activation"]]
    precision = str(config["trainer"]["precision"])
    return TransformerConfig(
        **values,
        tensor_model_parallel_size=degree,
        sequence_parallel=config["strategy"]["sequence_parallel"] and degree > 1,
        params_dtype=DTYPES[precision],
        pipeline_dtype=DTYPES[precision],
        bf16=precision == "bf16-mixed",
        fp16=precision == "16-mixed",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
    )


def gpt_options(config: dict[str, Any]) -> dict[str, Any]:
    """``GPTModel``'s other arguments."""
    model = config["model"]
    return {
        "max_sequence_length": model["seq_length"],
        "position_embedding_type": model["position_embedding_type"],
        "rotary_percent": model["rotary_percent"],
        "rotary_base": model["rotary_base"],
        "share_embeddings_and_output_weights": model["share_embeddings_and_output_weights"],
    }


def ddp_config(config: dict[str, Any]) -> DistributedDataParallelConfig:
    """Megatron's data-parallel config."""
    names = {field.name for field in fields(DistributedDataParallelConfig)}
    values = {name: value for name, value in config["strategy"].items() if name in names}
    sharded = config["optim"]["use_distributed_optimizer"]
    return DistributedDataParallelConfig(**values, use_distributed_optimizer=sharded)


def optimizer_config(config: dict[str, Any]) -> OptimizerConfig:
    """Megatron's optimizer config, without the schedule."""
    values = {name: value for name, value in config["optim"].items() if name not in _SCHEDULE}
    precision = str(config["trainer"]["precision"])
    return OptimizerConfig(
        **values,
        bf16=precision == "bf16-mixed",
        fp16=precision == "16-mixed",
        params_dtype=DTYPES[precision],
        overlap_param_gather=config["strategy"]["overlap_param_gather"],
    )
