"""Build a run from its configuration with NeMo's public classes, and train.

``uneven_tp=off`` hands everything to stock NeMo; ``uneven_tp=on`` swaps the strategy.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.utils import init_method_normal
from nemo import lightning as nl
from nemo.collections import llm
from nemo.lightning import _strategy_lib
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler

from nemo_uneven_tp import cpu_mode
from nemo_uneven_tp.checkpoint import stock_fixes, writers
from nemo_uneven_tp.checkpoint.files import FOLDER, complete_from
from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.initial_weights import StockReferenceInit
from nemo_uneven_tp.layout_options import LayoutOptions
from nemo_uneven_tp.nemo import patches
from nemo_uneven_tp.nemo.callbacks import RunReport
from nemo_uneven_tp.nemo.checkpoint import Resume, RunCheckpoints, complete_in, read_on_cpu
from nemo_uneven_tp.nemo.goodput_callback import GoodputCallback
from nemo_uneven_tp.nemo.logs import Console
from nemo_uneven_tp.nemo.text_data import build_data_module
from nemo_uneven_tp.plan import Plan

CPU_MODEL_SETTINGS: dict[str, Any] = {
    # Every rank draws the whole weight from one generator and keeps its slice.
    "use_cpu_initialization": True,
    # Kernels of Apex, Transformer Engine or a compiler.
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "apply_rope_fusion": False,
}
"""Fields of ``GPTConfig`` that a machine without GPUs needs to have this way."""


class RunLogger(nl.NeMoLogger):
    """NeMo's logger without log files of its own: ``train.log`` has it all."""

    def _setup_file_logging(self, log_dir: Path) -> None:
        pass


def run(config: dict[str, Any], plan: Plan, run_dir: Path, console: Console) -> None:
    """Train as ``config`` says, as one of the processes of the run.

    Raises:
        UserError: if something can't be had on this machine.
    """
    if "recipe" in config:
        from nemo_uneven_tp.nemo.recipe import run_recipe

        run_recipe(config, plan, run_dir, console)
        return
    on_cpu = cpu_mode.activate()
    patches.let_nemo_call_newer_megatron()
    if on_cpu and config["trainer"]["accelerator"] == "gpu":
        raise UserError(
            "trainer.accelerator=gpu, but torch finds no GPU here; set trainer.accelerator=cpu or "
            "start on a machine with GPUs"
        )
    data = build_data_module(config, run_dir)
    model = llm.GPTModel(gpt_config(config, plan, on_cpu), tokenizer=data.tokenizer)
    report = RunReport(
        run_dir,
        console,
        tokens_per_step=plan.global_batch_size * plan.model.seq_length,
        global_batch_size=plan.global_batch_size,
        check_replicas_every=config["uneven_tp"]["check_replicas_every"],
    )
    strategy = build_strategy(config, plan, on_cpu)
    resume = build_resume(config, run_dir, strategy, console)
    recorder = GoodputCallback(run_dir, process_start_written=True)
    callbacks = [recorder, report, *build_checkpoints(config, plan, run_dir)]
    with seeded(config["seed"]):
        llm.pretrain(
            model=model,
            data=data,
            trainer=build_trainer(config, strategy, callbacks, on_cpu),
            resume=resume,
            log=RunLogger(explicit_log_dir=str(run_dir), use_datetime_version=False),
            optim=build_optimizer(config),
        )


def gpt_config(config: dict[str, Any], plan: Plan, on_cpu: bool) -> llm.GPTConfig:
    """NeMo's model configuration: the fields of ``config["model"]`` as they are."""
    values = dict(config["model"])
    reference = values.pop("reference_tensor_parallel_size")
    values["activation_func"] = activation(values.pop("activation"))
    if on_cpu:
        values.update(CPU_MODEL_SETTINGS)
    stock = not config["uneven_tp"]["enabled"]
    if stock and reference not in (None, plan.tensor_model_parallel_size):
        _start_like_reference(values, plan)
    return llm.GPTConfig(**values)


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function that ``model.activation`` names."""
    from megatron.core import activations

    return {
        "gelu": F.gelu,
        "quick_gelu": activations.quick_gelu,
        "relu": F.relu,
        "silu": F.silu,
        "squared_relu": activations.squared_relu,
    }[name]


def build_strategy(config: dict[str, Any], plan: Plan, on_cpu: bool) -> nl.MegatronStrategy:
    """The stock strategy, or ours for ``uneven_tp=on``."""
    ddp_fields = {field.name for field in fields(DistributedDataParallelConfig)}
    own = set(inspect.signature(nl.MegatronStrategy).parameters)
    strategy = dict(config["strategy"])
    ddp = DistributedDataParallelConfig(
        **{name: value for name, value in strategy.items() if name in ddp_fields - own},
        use_distributed_optimizer=config["optim"]["use_distributed_optimizer"],
    )
    arguments: dict[str, Any] = {
        # Ours prints the steps; NeMo's, on rank 0 alone, enters a collective of the world.
        "replace_progress_bar": False,
        "ckpt_async_save": config["checkpoint"]["async_save"],
        # The one format of the distributed optimizer that other layouts can read.
        "ckpt_optim_fully_reshardable": True,
        **{name: value for name, value in strategy.items() if name in own},
        "ddp": ddp,
    }
    uneven_tp = config["uneven_tp"]
    if uneven_tp["enabled"]:
        from nemo_uneven_tp.nemo.strategy import UnevenMegatronStrategy

        return UnevenMegatronStrategy(
            failed_ranks=uneven_tp["failed_ranks"],
            degrees=uneven_tp["degrees"],
            allow_dropped_replicas=uneven_tp["allow_dropped_replicas"],
            reference_tensor_parallel_size=config["model"]["reference_tensor_parallel_size"],
            expected_plan_digest=plan.digest,
            layout_options=LayoutOptions.of(uneven_tp),
            **arguments,
        )
    if on_cpu:
        from nemo_uneven_tp.nemo.cpu_strategy import CPUMegatronStrategy

        return CPUMegatronStrategy(**arguments)
    resume = config["resume"]
    if resume["auto"] or resume["from"] is not None:
        from nemo_uneven_tp.nemo.cpu_strategy import CheckedMegatronStrategy

        return CheckedMegatronStrategy(**arguments)
    return nl.MegatronStrategy(**arguments)


def build_checkpoints(config: dict[str, Any], plan: Plan, run_dir: Path) -> list[RunCheckpoints]:
    """The callback that saves checkpoints, if ``checkpoint.every_n_steps`` is set."""
    checkpoint = config["checkpoint"]
    if checkpoint["every_n_steps"] is None:
        return []
    about = {
        "run": config["name"],
        "uneven_tp": config["uneven_tp"]["enabled"],
        "degrees": plan.degree_table,
        "tensor_model_parallel_size": plan.tensor_model_parallel_size,
        "plan": plan.digest,
        "precision": str(config["trainer"]["precision"]),
        "use_distributed_optimizer": config["optim"]["use_distributed_optimizer"],
    }
    folder = run_dir / FOLDER
    return [RunCheckpoints(folder, checkpoint["every_n_steps"], checkpoint["keep"], about)]


def build_resume(
    config: dict[str, Any], run_dir: Path, strategy: Any, console: Console
) -> Resume | None:
    """What to start from by ``resume``, and the older ones behind it.

    Raises:
        UserError: if there is nothing complete to start from where ``resume.from`` says.
    """
    resume = config["resume"]
    saves = config["checkpoint"]["every_n_steps"] is not None
    if saves or resume["auto"] or resume["from"] is not None:
        stock_fixes.apply()
        writers.end_with_this_process()
        read_on_cpu()
    is_rank_0 = int(os.environ.get("RANK", "0")) == 0

    def say(line: str) -> None:
        if is_rank_0:
            console.line(line)

    found = complete_in(run_dir, say) if resume["auto"] else []
    if not found and resume["from"] is not None:
        found = complete_from(Path(resume["from"]).expanduser().absolute())
    if not found:
        return None
    say(f"resuming from {found[0].path}")
    strategy.resume_from, strategy.fall_back, strategy.say = found, resume["fall_back"], say
    return Resume(found[0])


def build_trainer(
    config: dict[str, Any], strategy: Any, callbacks: list[Any], on_cpu: bool
) -> nl.Trainer:
    """NeMo's trainer without progress bars and loggers."""
    settings = dict(config["trainer"])
    settings.pop("precision")
    settings["accelerator"] = "cpu" if on_cpu else "gpu"
    return nl.Trainer(
        **settings,
        strategy=strategy,
        plugins=build_precision(config),
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=config["checkpoint"]["every_n_steps"] is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_test_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        log_every_n_steps=1,
    )


def build_precision(config: dict[str, Any]) -> nl.MegatronMixedPrecision:
    """Mixed precision as in NeMo's recipes: parameters in the 16-bit type."""
    precision = config["trainer"]["precision"]
    dtype = {"32": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}[
        str(precision)
    ]
    return nl.MegatronMixedPrecision(
        precision=str(precision),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        grad_reduce_in_fp32=config["strategy"]["grad_reduce_in_fp32"],
    )


def build_optimizer(config: dict[str, Any]) -> nl.MegatronOptimizerModule:
    """Megatron's optimizer with NeMo's cosine schedule, as in NeMo's recipes."""
    optim = dict(config["optim"])
    schedule = {name: optim.pop(name) for name in ("min_lr", "warmup_steps", "constant_steps")}
    precision = str(config["trainer"]["precision"])
    return nl.MegatronOptimizerModule(
        config=OptimizerConfig(
            **optim,
            bf16=precision == "bf16-mixed",
            fp16=precision == "16-mixed",
            overlap_param_gather=config["strategy"]["overlap_param_gather"],
        ),
        lr_scheduler=CosineAnnealingScheduler(max_steps=config["trainer"]["max_steps"], **schedule),
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """While active, NeMo seeds every random state from ``seed`` rather than from 1234.

    NeMo has no other door: ``MegatronStrategy`` calls ``init_parallel_ranks`` without a seed.
    """
    if seed < 1:
        raise UserError(f"seed={seed} must be at least 1, which is what NeMo takes")
    stock = _strategy_lib.init_parallel_ranks
    _strategy_lib.init_parallel_ranks = partial(stock, seed=seed)
    try:
        yield
    finally:
        _strategy_lib.init_parallel_ranks = stock


def _start_like_reference(values: dict[str, Any], plan: Plan) -> None:
    """Make a stock run start like one at ``model.reference_tensor_parallel_size``.

    Through what ``GPTConfig`` offers: a preset padded vocabulary and, for a gated MLP whose
    master weight stock Megatron reads differently at each degree, an ``init_method``.
    """
    reference = plan.reference_tensor_parallel_size
    key = f"model.reference_tensor_parallel_size={reference}"
    degree = plan.tensor_model_parallel_size
    if plan.vocab_size % degree:
        raise UserError(
            f"{key} pads the vocabulary to {plan.vocab_size} rows, which stock Megatron can't cut "
            f"into strategy.tensor_model_parallel_size={degree} equal parts; change "
            "model.make_vocab_size_divisible_by or use uneven_tp=on"
        )
    values["vocab_size"] = plan.vocab_size
    if not plan.model.gated_linear_unit:
        return
    try:
        original = init_method_normal(values["init_method_std"])
        values["init_method"] = StockReferenceInit(original, plan, degree, reference)
    except ValueError as error:
        raise UserError(
            f"{key} can't be reproduced by stock NeMo here, since {error}; use uneven_tp=on"
        ) from error
