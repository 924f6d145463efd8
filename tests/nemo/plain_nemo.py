"""Stock NeMo in processes that cannot import the plugin: ``torchrun plain_nemo.py ARGUMENTS``.

Trains the configuration of an ``uneven-tp`` run with NeMo's own strategy, resume and checkpoint
callback. What NeMo lacks on a machine without GPUs is given to it here; ``cpu_mode.py``, which
translates CUDA calls and knows nothing of checkpoints, is read as a file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

# Also in the helper processes of a save, which import this file again.
sys.modules["nemo_uneven_tp"] = None  # type: ignore[assignment]  # any import of it fails


def cpu_mode(file: Path) -> None:
    """Run NeMo and Megatron on CPU."""
    spec = importlib.util.spec_from_file_location("cpu_mode_file", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.activate()


def train(arguments: argparse.Namespace) -> None:
    """Train to the end and write the losses as ``{step: loss}``."""
    cpu_mode(arguments.cpu_mode)
    import lightning.pytorch as pl
    import torch
    import torch.nn.functional as F
    import yaml
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from nemo import lightning as nl
    from nemo.collections import llm
    from nemo.collections.common.tokenizers.bytelevel_tokenizers import ByteLevelTokenizer
    from nemo.lightning.io import pl as checkpoint_io
    from nemo.lightning.pytorch.callbacks import ModelCheckpoint
    from nemo.lightning.pytorch.optim import CosineAnnealingScheduler

    checkpoint_io._fix_tensors_device = lambda checkpoint: checkpoint

    class CPUStrategy(nl.MegatronStrategy):
        def setup_distributed(self) -> None:
            super().setup_distributed()
            model_parallel_cuda_manual_seed(torch.initial_seed())

        def load_optimizer_state_dict(
            self, checkpoint: Any, selective_restore: bool = False
        ) -> None:
            # Stock moves it through a CUDA device mesh.
            for optimizer, state in zip(self.optimizers, checkpoint["optimizer"], strict=True):
                optimizer.load_state_dict(state)

    losses: dict[int, float] = {}

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            losses[trainer.global_step - 1] = float(trainer.callback_metrics["reduced_train_loss"])

    config = yaml.safe_load(arguments.config.read_text(encoding="utf-8"))
    steps = config["trainer"]["max_steps"]
    fields = {k: v for k, v in config["model"].items() if k != "reference_tensor_parallel_size"}
    fused = ("gradient_accumulation", "masked_softmax", "bias_activation", "bias_dropout")
    fields |= {f"{name}_fusion": False for name in (*fused, "cross_entropy_loss")}
    fields |= {"apply_rope_fusion": False, "use_cpu_initialization": True}
    fields["activation_func"] = getattr(F, fields.pop("activation"))
    tokenizer = ByteLevelTokenizer()
    data = llm.PreTrainingDataModule(
        paths=arguments.text,
        seq_length=fields["seq_length"],
        tokenizer=tokenizer,
        micro_batch_size=config["data"]["micro_batch_size"],
        global_batch_size=config["data"]["global_batch_size"],
        num_workers=0,
        persistent_workers=False,
        pin_memory=False,
        seed=config["data"]["seed"],
        split=config["data"]["split"],
        index_mapping_dir=str(arguments.folder / "index"),
    )
    optim = dict(config["optim"])
    schedule = {name: optim.pop(name) for name in ("min_lr", "warmup_steps", "constant_steps")}
    saves = ModelCheckpoint(
        dirpath=str(arguments.folder / "checkpoints"),
        filename="{step}",
        monitor="step",
        mode="max",
        save_top_k=-1,
        save_last=False,
        every_n_train_steps=arguments.save_every,
    )
    resume = nl.AutoResume(resume_from_path=arguments.resume) if arguments.resume else None
    llm.pretrain(
        model=llm.GPTModel(llm.GPTConfig(**fields), tokenizer=tokenizer),
        data=data,
        trainer=nl.Trainer(
            accelerator="cpu",
            devices=arguments.devices,
            max_steps=steps,
            val_check_interval=steps,
            limit_val_batches=0,
            limit_test_batches=0,
            num_sanity_val_steps=0,
            strategy=CPUStrategy(
                tensor_model_parallel_size=arguments.devices,
                ckpt_async_save=False,
                replace_progress_bar=False,
                ddp=DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    use_distributed_optimizer=optim["use_distributed_optimizer"],
                ),
            ),
            plugins=nl.MegatronMixedPrecision(precision="32", params_dtype=torch.float32),
            callbacks=[Losses(), saves],
            logger=False,
            enable_progress_bar=False,
            use_distributed_sampler=False,
            log_every_n_steps=1,
        ),
        resume=resume,
        log=nl.NeMoLogger(explicit_log_dir=str(arguments.folder), use_datetime_version=False),
        optim=nl.MegatronOptimizerModule(
            config=OptimizerConfig(**optim),
            lr_scheduler=CosineAnnealingScheduler(max_steps=steps, **schedule),
        ),
    )
    if torch.distributed.get_rank() == 0:
        (arguments.folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    torch.distributed.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("config", "folder", "cpu-mode"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--text", required=True, help="prefix of the tokenized text")
    parser.add_argument("--devices", type=int, required=True)
    parser.add_argument("--resume", help="folder of weights to start from")
    parser.add_argument("--save-every", type=int, default=1000)
    train(parser.parse_args())
