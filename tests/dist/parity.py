"""What the ranks of a parity case do: a stock run and an uneven run of the same model.

The reference is stock Megatron-Core on one process with the whole global batch. Canonical
tensors are put together here by plain concatenation, independently of the product's segments.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as stock_finalize
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_uneven_tp import cpu_mode
from nemo_uneven_tp.batch import assign_micro_batches
from nemo_uneven_tp.buckets import main_grad
from nemo_uneven_tp.distributed_data_parallel import UnevenDistributedDataParallel
from nemo_uneven_tp.finalize_grads import finalize_model_grads
from nemo_uneven_tp.layer_specs import build_gpt_model
from nemo_uneven_tp.layout_options import LayoutOptions
from nemo_uneven_tp.model_shape import ModelShape, cut_of
from nemo_uneven_tp.optimizer import get_uneven_optimizer
from nemo_uneven_tp.parallel_state import (
    destroy_uneven_model_parallel,
    get_state,
    initialize_uneven_model_parallel,
)
from nemo_uneven_tp.plan import Cell, Plan
from nemo_uneven_tp.planner import PlanRequest, make_plan
from nemo_uneven_tp.stage_communication import uneven_forward_backward_func
from nemo_uneven_tp.wire import count_traffic


@dataclass(frozen=True)
class Case:
    """One model, layout and way of training, drawn from ``seed``."""

    seed: int
    shape: ModelShape
    degrees: tuple[Any, ...]
    global_batch_size: int
    micro_batch_size: int
    steps: int = 3
    per_token: bool = False
    sequence_parallel: bool = False
    overlap: bool = False
    bucket_size: int | None = None
    precision: str = "fp32"
    grad_reduce_in_fp32: bool = True
    distributed_optimizer: bool = False
    optimizer: str = "adam"
    clip_grad: float = 1.0
    lr: float = 1e-2
    overlap_param_gather: bool = False
    average_in_collective: bool = False
    check_for_nan: bool | None = None  # None: where no loss scaling expects overflows
    log_num_zeros: bool = False
    initial_loss_scale: float = 2.0**32
    reference: int | None = 1
    learnable: bool = False
    options: LayoutOptions = LayoutOptions()
    stages: int = 1
    chunks: int | None = None

    def plan(self) -> Plan:
        """The plan of the uneven run."""
        nominal = max(d for row in self.degrees for d in (row if self.stages > 1 else (row,)))
        return make_plan(
            PlanRequest(
                model=self.shape,
                tensor_model_parallel_size=nominal,
                world_size=nominal * len(self.degrees) * self.stages,
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.micro_batch_size,
                degrees=self.degrees,
                reference_tensor_parallel_size=self.reference,
                sequence_parallel=self.sequence_parallel,
                pipeline_model_parallel_size=self.stages,
                virtual_pipeline_model_parallel_size=self.chunks,
                options=self.options,
            )
        )


def draw_case(seed: int, max_world: int = 8, **fixed: Any) -> Case:
    """A random case: sizes mostly indivisible, degrees mostly different."""
    rng = random.Random(seed)
    while True:
        degrees = tuple(rng.randint(1, 4) for _ in range(rng.randint(2, 4)))
        if sum(degrees) <= max_world and len(set(degrees)) > 1:
            break
    groups = rng.randint(max(degrees), 7)
    micro_batch_size = rng.choice([1, 1, 2])
    shape = ModelShape(
        num_layers=rng.choice([1, 2]),
        hidden_size=rng.choice([16, 20, 24]),
        num_attention_heads=groups * rng.choice([1, 1, 2, 3]),
        num_query_groups=groups,
        kv_channels=rng.choice([4, 6, 8]),
        ffn_hidden_size=rng.randint(max(degrees), 41),
        vocab_size=rng.randint(11, 73),
        seq_length=rng.choice([6, 9, 12]),
        gated_linear_unit=rng.random() < 0.5,
        add_bias_linear=rng.random() < 0.5,
        add_qkv_bias=rng.random() < 0.5,
        normalization=rng.choice(["LayerNorm", "RMSNorm"]),
        position_embedding_type=rng.choice(["learned_absolute", "rope"]),
        share_embeddings_and_output_weights=rng.random() < 0.5,
        make_vocab_size_divisible_by=rng.randint(1, 5),
        qk_layernorm=rng.random() < 0.25,
    )
    case = Case(
        seed=seed,
        shape=shape,
        degrees=degrees,
        micro_batch_size=micro_batch_size,
        global_batch_size=micro_batch_size * rng.randint(len(degrees), 9),
        per_token=rng.random() < 0.3,
        overlap=rng.random() < 0.5,
        bucket_size=rng.choice([None, 1, 500, 3000]),
    )
    case = replace(case, **fixed)
    if rng.random() < 0.3:
        # 12 is a multiple of every degree drawn.
        case = replace(case, sequence_parallel=True, shape=replace(case.shape, seq_length=12))
    return case


def draw_pipeline_case(seed: int, stages: int, max_world: int = 8, **fixed: Any) -> Case:
    """A random case of several stages, the degrees of each drawn on its own."""
    rng = random.Random(seed)
    while True:
        rows = rng.randint(1, 3)
        table = tuple(tuple(rng.randint(1, 4) for _ in range(stages)) for _ in range(rows))
        flat = [degree for row in table for degree in row]
        if sum(flat) <= max_world and len(set(flat)) > 1:
            break
    case = draw_case(seed, **fixed)
    groups = max(case.shape.num_query_groups, *flat)
    heads = case.shape.heads_per_group
    chunks = case.chunks or 1
    shape = replace(
        case.shape,
        num_layers=stages * chunks * rng.choice([1, 1, 2]),
        num_query_groups=groups,
        num_attention_heads=groups * heads,
        ffn_hidden_size=max(case.shape.ffn_hidden_size, *flat),
    )
    micro_batches = rng.randint(len(table), 7)
    if chunks > 1:
        micro_batches = stages * len(table) * rng.randint(1, 2)
    return replace(
        case,
        shape=shape,
        stages=stages,
        degrees=table,
        global_batch_size=case.micro_batch_size * micro_batches,
    )


def transformer_config(case: Case, degree: int) -> TransformerConfig:
    """Megatron's config of ``case``."""
    shape = case.shape
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.precision]
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        ffn_hidden_size=shape.ffn_hidden_size,
        gated_linear_unit=shape.gated_linear_unit,
        activation_func=torch.nn.functional.silu
        if shape.gated_linear_unit
        else torch.nn.functional.gelu,
        add_bias_linear=shape.add_bias_linear,
        add_qkv_bias=shape.add_qkv_bias,
        normalization=shape.normalization,
        qk_layernorm=shape.qk_layernorm,
        tensor_model_parallel_size=degree,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=case.per_token,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=case.precision == "bf16",
        fp16=case.precision == "fp16",
    )


def run_stock(case: Case, degree: int = 1, distributed: bool = False) -> dict[str, Any]:
    """Train ``case`` with stock Megatron at ``degree``; all ranks together make up the replicas."""
    cpu_mode.activate()
    mpu.initialize_model_parallel(tensor_model_parallel_size=degree)
    try:
        built = build_stock(case, degree, distributed)
        if case.stages > 1:
            load_stages(case, built[1])
        replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        micro_batches = list(
            range(replica, case.global_batch_size // case.micro_batch_size, replicas)
        )
        return train(case, *built, micro_batches, None)
    finally:
        mpu.destroy_model_parallel()


def build_stock(
    case: Case, degree: int, distributed: bool
) -> tuple[TransformerConfig, GPTModel, Any, Any]:
    """Stock Megatron's config, model, wrapped model and optimizer of this rank."""
    config = transformer_config(case, degree)
    seed_everything(case.seed)
    model = GPTModel(
        config,
        layer_spec(case),
        vocab_size=case.shape.padded_vocab_size(degree),
        **gpt_options(case),
    )
    config.finalize_model_grads_func = stock_finalize
    chunk = DistributedDataParallel(config, ddp_config(case, distributed), wrap(config, model))
    optimizer = get_megatron_optimizer(optimizer_config(case, distributed), [chunk])
    return config, model, chunk, optimizer


def load_stages(case: Case, whole: GPTModel) -> None:
    """Give ``whole`` the weights that the stages of a stock pipeline start with.

    Every stage draws its own layers, from a seed of its own.
    """
    config = transformer_config(case, 1)
    config.pipeline_model_parallel_size = case.stages
    config.virtual_pipeline_model_parallel_size = case.chunks
    groups = ProcessGroupCollection.use_mpu_process_groups()
    weights = {}
    for stage in range(case.stages):
        groups.pp = StandInGroup(stage, case.stages)
        seed_everything(case.seed, stage)
        for chunk in range(case.chunks or 1):
            part = GPTModel(
                config,
                layer_spec(case),
                vocab_size=case.shape.padded_vocab_size(1),
                pre_process=stage == 0 and chunk == 0,
                post_process=stage == case.stages - 1 and chunk == (case.chunks or 1) - 1,
                vp_stage=None if case.chunks is None else chunk,
                pg_collection=groups,
                **gpt_options(case),
            )
            weights.update(local(part))
    with torch.no_grad():
        for name, parameter in named(whole):
            parameter.copy_(weights[name])


@dataclass
class StandInGroup:
    """Says which stage of how many a model is built for; nothing communicates over it."""

    stage: int
    stages: int

    def rank(self) -> int:
        """The stage."""
        return self.stage

    def size(self) -> int:
        """Number of stages."""
        return self.stages


def run_uneven(case: Case) -> dict[str, Any]:
    """Train ``case`` uneven, as one of its ranks."""
    cpu_mode.activate()
    plan = case.plan()
    state = initialize_uneven_model_parallel(plan)
    try:
        config, model, chunk, optimizer = build_uneven(case)
        mine = list(assign_micro_batches(plan.micro_batches)[state.cell.replica])
        return train(case, config, model, chunk, optimizer, mine, plan)
    finally:
        destroy_uneven_model_parallel()


def build_uneven(case: Case) -> tuple[TransformerConfig, Any, Any, Any]:
    """Config, model, wrapped model and optimizer of this rank; lists if there are chunks."""
    seed_everything(case.seed, get_state().cell.stage)
    models = []
    chunks: list[torch.nn.Module] = []
    for chunk in range(case.chunks or 1):
        model = build_gpt_model(
            transformer_config(case, 1),
            layer_spec(case),
            None if case.chunks is None else chunk,
            **gpt_options(case),
        )
        model.config.finalize_model_grads_func = finalize_model_grads
        models.append(model)
    for model in models:
        wrapped = wrap(model.config, model)
        options = ddp_config(case, case.distributed_optimizer)
        chunks.append(UnevenDistributedDataParallel(model.config, options, wrapped))
    optimizer = get_uneven_optimizer(optimizer_config(case, case.distributed_optimizer), chunks)
    if case.chunks is None:
        return models[0].config, models[0], chunks[0], optimizer
    return models[0].config, models, chunks, optimizer


def layer_spec(case: Case) -> Any:
    """Megatron's local layer spec."""
    return get_gpt_layer_local_spec(
        qk_layernorm=case.shape.qk_layernorm, normalization=case.shape.normalization
    )


def seed_everything(seed: int, stage: int = 0) -> None:
    """Seed as NeMo does."""
    seed += 1000 + 100 * stage
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    torch.manual_seed(seed)


def gpt_options(case: Case) -> dict[str, Any]:
    """GPTModel's other arguments."""
    return {
        "max_sequence_length": case.shape.seq_length,
        "position_embedding_type": case.shape.position_embedding_type,
        "share_embeddings_and_output_weights": case.shape.share_embeddings_and_output_weights,
    }


def wrap(config: TransformerConfig, model: torch.nn.Module) -> torch.nn.Module:
    """Megatron's wrapper for 16-bit models."""
    from megatron.core.transformer.module import Float16Module

    return Float16Module(config, model) if config.bf16 or config.fp16 else model


def ddp_config(case: Case, distributed: bool) -> DistributedDataParallelConfig:
    """Megatron's DDP config of ``case``."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=case.grad_reduce_in_fp32,
        overlap_grad_reduce=case.overlap,
        bucket_size=case.bucket_size,
        check_for_nan_in_grad=case.precision != "fp16"
        if case.check_for_nan is None
        else case.check_for_nan,
        use_distributed_optimizer=distributed,
        overlap_param_gather=distributed and case.overlap_param_gather,
        average_in_collective=case.average_in_collective,
    )


def optimizer_config(case: Case, distributed: bool) -> OptimizerConfig:
    """Megatron's optimizer config of ``case``."""
    return OptimizerConfig(
        optimizer=case.optimizer,
        lr=case.lr,
        weight_decay=0.1,
        clip_grad=case.clip_grad,
        use_distributed_optimizer=distributed,
        overlap_param_gather=distributed and case.overlap_param_gather,
        log_num_zeros_in_grad=case.log_num_zeros,
        initial_loss_scale=case.initial_loss_scale,
        hysteresis=1,  # one overflow lowers the loss scale
        bf16=case.precision == "bf16",
        fp16=case.precision == "fp16",
        params_dtype={
            "fp32": torch.float32,
            "bf16": torch.bfloat16,
            "fp16": torch.float16,
        }[case.precision],
    )


def batch_of(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[global batch, seq + 1]`` and loss mask ``[global batch, seq]`` of a step."""
    generator = torch.Generator().manual_seed(case.seed * 7919 + step)
    size = (case.global_batch_size, case.shape.seq_length + 1)
    tokens = torch.randint(0, case.shape.vocab_size, size, generator=generator)
    if case.learnable:  # each token is the one before times 3 plus 1, but for every fifth or so
        kept = torch.rand(size, generator=generator) < 0.8
        for i in range(1, size[1]):
            following = (tokens[:, i - 1] * 3 + 1) % case.shape.vocab_size
            tokens[:, i] = torch.where(kept[:, i], following, tokens[:, i])
    mask = (torch.rand(size[0], size[1] - 1, generator=generator) < 0.8).float()
    mask[:, 0] = 1.0
    return tokens, mask


def train(
    case: Case,
    config: TransformerConfig,
    model: GPTModel,
    chunk: Any,
    optimizer: Any,
    micro_batches: list[int],
    plan: Plan | None,
    before_step: Callable[[int], None] | None = None,
    after_step: Callable[[int], None] | None = None,
    first_step: int = 0,
) -> dict[str, Any]:
    """Train and report losses, first gradients, gradient statistics and final parameters.

    ``before_step`` and ``after_step`` are called with the number of the step.
    """
    models = model if isinstance(model, list) else [model]
    chunks = chunk if isinstance(chunk, list) else [chunk]
    no_sync = [each.no_sync for each in chunks]
    config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]
    config.grad_scale_func = optimizer.scale_loss
    uneven = plan is not None
    forward_backward = (
        uneven_forward_backward_func(config) if uneven else get_forward_backward_func()
    )
    sequence = case.shape.seq_length
    causal = torch.triu(torch.ones(1, 1, sequence, sequence, dtype=torch.bool), 1)
    report: dict[str, Any] = {"losses": [], "grad_norms": [], "initial": local(*models)}
    report |= {"zeros": [], "successes": [], "loss_scales": []}

    def loss_func(mask: torch.Tensor, output: torch.Tensor) -> Any:
        total = (output.float() * mask).sum()
        tokens = mask.sum().to(torch.int)
        return total, tokens, {"sum": total.detach().clone(), "tokens": tokens.clone()}

    def forward_step(iterator: Any, module: torch.nn.Module) -> Any:
        tokens, mask = next(iterator)
        positions = torch.arange(sequence)[None].expand(tokens.shape[0], sequence)
        output = module(tokens[:, :-1], positions, causal, labels=tokens[:, 1:])
        return output, partial(loss_func, mask)

    for step in range(first_step, case.steps):
        tokens, mask = batch_of(case, step)
        size = case.micro_batch_size
        parts = [
            (tokens[i * size : (i + 1) * size], mask[i * size : (i + 1) * size])
            for i in micro_batches
        ]
        data = [iter(parts) for _ in chunks]
        if before_step is not None:
            before_step(step)
        for each in chunks:
            each.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=data if len(data) > 1 else data[0],
            model=chunk,
            num_microbatches=len(micro_batches),
            seq_length=sequence,
            micro_batch_size=size,
            forward_only=False,
        )
        if step == 0 and not case.distributed_optimizer:
            report["grads"] = {
                n: main_grad(p).float().clone() for each in models for n, p in named(each)
            }
        success, grad_norm, zeros = optimizer.step()
        report["grad_norms"].append(None if grad_norm is None else float(grad_norm))
        report["successes"].append(success)
        report["zeros"].append(zeros)
        report["loss_scales"].append(float(optimizer.get_loss_scale()))
        report["losses"].append(
            (float(sum(x["sum"] for x in losses)), int(sum(x["tokens"] for x in losses)))
        )
        if after_step is not None:
            after_step(step)
    for each in chunks:
        if each.ddp_config.use_distributed_optimizer and each.ddp_config.overlap_param_gather:
            each.start_param_sync(force_sync=True)
    report["final"] = local(*models)
    return report


def local(*models: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of this rank's parameters, layers numbered as in the whole model."""
    return {name: p.detach().clone() for model in models for name, p in named(model)}


def named(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters with their names in the whole model."""
    for name, parameter in model.named_parameters():
        words = name.split(".")
        if "layers" in words:
            at = words.index("layers") + 1
            words[at] = str(model.decoder.layers[int(words[at])].layer_number - 1)
        yield ".".join(words), parameter


def loss_curve(plan: Plan, reports: list[dict[str, Any]]) -> list[float]:
    """Mean loss over the tokens of each global batch, from the last stages' first ranks."""
    curve = []
    for step in range(len(reports[0]["losses"])):
        last = plan.cells_of_stage(plan.stages - 1)
        parts = [reports[cell.ranks[0]]["losses"][step] for cell in last]
        curve.append(sum(p[0] for p in parts) / sum(p[1] for p in parts))
    return curve


def canonical(
    plan: Plan, replica: int, tensors: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Put the local tensors of one replica's ranks together into global ones."""
    whole: dict[str, torch.Tensor] = {}
    for cell in plan.cells_of_replica(replica):
        whole |= of_cell(plan, cell, tensors)
    if plan.ties_stages:
        tied = whole.pop("output_layer.weight")
        assert torch.equal(tied, whole["embedding.word_embeddings.weight"]), "tied weights differ"
    return whole


def of_cell(
    plan: Plan, cell: Cell, tensors: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Put the local tensors of one cell's ranks together."""
    replica, whole = cell.replica, {}
    for name in tensors[cell.ranks[0]]:
        cut = cut_of(name, plan.model)
        parts = [tensors[rank][name] for rank in cell.ranks]
        if cut is None:
            for part in parts[1:]:
                assert torch.equal(part, parts[0]), f"{name} differs inside replica {replica}"
            whole[name] = parts[0]
            continue
        runs = []
        for tp_rank, part in enumerate(parts):
            length = len(cell.share(cut.axis, tp_rank)) * cut.per_unit
            runs.append(part.unflatten(cut.dim, (cut.runs, -1)).narrow(cut.dim + 1, 0, length))
        whole[name] = torch.cat(runs, cut.dim + 1).flatten(cut.dim, cut.dim + 1)
    return whole


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of all bytes, in name order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def count_sync(case: Case) -> list[tuple[str, tuple[int, ...], int]]:
    """Collectives of gradient and parameter sync of one step, without those of statistics."""
    calls: list[tuple[str, tuple[int, ...], int]] = []
    cpu_mode.activate()
    plan = case.plan()
    initialize_uneven_model_parallel(plan)
    try:
        config, model, chunk, optimizer = build_uneven(case)
        for parameter in model.parameters():
            parameter.main_grad.fill_(1e-3)
        with count_traffic() as traffic:
            if case.overlap:
                for parameter in reversed(list(model.parameters())):
                    chunk.param_to_bucket_group[parameter].register_grad_ready(parameter)
            finalize_model_grads([chunk])
        calls += [(c.kind, c.ranks, c.nbytes) for c in traffic.calls]
        if case.distributed_optimizer:
            with count_traffic() as traffic:
                optimizer.step()
                chunk.start_param_sync(force_sync=True)
            world = tuple(range(plan.world_size))
            calls += [(c.kind, c.ranks, c.nbytes) for c in traffic.calls if c.ranks != world]
        return calls
    finally:
        destroy_uneven_model_parallel()
