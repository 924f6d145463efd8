"""NeMo's ``PreTrainingDataModule`` over the text that ``data`` names.

Call :func:`build_data_module` in every process of a job, before ``torch.distributed`` is
initialized: it tokenizes the text and makes Megatron's sample index, once for all processes
and runs that ask for the same, behind file locks. Stock code then only finds ready files.
(Left to itself, Megatron's rank 0 writes index files piece by piece, and a killed or
simultaneous run would read half of them.)

The order of samples depends on text, ``data.seed``, ``data.split``, ``model.seq_length``,
and the number of samples, never on the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_uneven_tp import text_files
from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.nemo import indexed_text, tokenizers

if TYPE_CHECKING:
    from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
    from nemo.collections.llm import PreTrainingDataModule

logger = logging.getLogger(__name__)

_COMPLETE = "complete.json"


def build_tokenizer(config: Mapping[str, Any]) -> TokenizerSpec:
    """The tokenizer of ``config["data"]["tokenizer"]``."""
    return tokenizers.build_tokenizer(config["data"]["tokenizer"])


def build_data_module(
    config: Mapping[str, Any], run_dir: Path | None = None
) -> PreTrainingDataModule:
    """The data module of a run, its files ready (see the module docstring).

    Args:
        config: a checked configuration; ``data``, ``trainer`` and ``model.seq_length`` count.
        run_dir: not written to; files go to ``data.cache_dir``, where later runs find them.

    Raises:
        UserError: the text, the tokenizer or the cache folder is bad, or the text too little.
    """
    import torch
    from nemo.collections.llm import PreTrainingDataModule

    data, trainer, seq_length = config["data"], config["trainer"], config["model"]["seq_length"]
    tokenizer = build_tokenizer(config)
    entry = indexed_text.ensure_indexed(
        text_files.resolve_text_files(data["paths"]),
        tokenizer,
        tokenizers.identity(data["tokenizer"]),
        None if data.get("cache_dir") is None else Path(data["cache_dir"]),
    )
    text_files.check_split(
        indexed_text.document_tokens(entry),
        data["split"],
        seq_length,
        trainer.get("limit_val_batches", 0),
    )
    index_dir = entry / f"index-{_index_key(config)}"
    module = PreTrainingDataModule(
        paths=str(indexed_text.prefix_of(entry)),
        seq_length=seq_length,
        tokenizer=tokenizer,
        micro_batch_size=data["micro_batch_size"],
        global_batch_size=data["global_batch_size"],
        num_workers=data.get("num_workers", 0),
        persistent_workers=data.get("num_workers", 0) > 0,
        pin_memory=torch.cuda.is_available(),
        seed=data["seed"],
        split=data["split"],
        index_mapping_dir=str(index_dir),
    )
    _prepare_index(module, trainer, index_dir)
    return module


def _build_arguments(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """What stock NeMo passes to ``PreTrainingDataModule.build`` once the trainer runs."""
    return {
        "trainer_max_steps": trainer["max_steps"],
        "trainer_val_check_interval": trainer.get("val_check_interval") or trainer["max_steps"],
        "trainer_limit_val_batches": trainer.get("limit_val_batches", 0),
        # 0 is what our trainer is built with.
        "trainer_limit_test_batches": trainer.get("limit_test_batches", 0),
    }


def _index_key(config: Mapping[str, Any]) -> str:
    """A digest of what Megatron's sample index depends on, besides the text."""
    data = config["data"]
    parts = {
        "seq_length": config["model"]["seq_length"],
        **{name: data[name] for name in ("split", "seed", "global_batch_size")},
        **_build_arguments(config["trainer"]),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _prepare_index(
    module: PreTrainingDataModule, trainer: Mapping[str, Any], index_dir: Path
) -> None:
    """Let Megatron build its index files in ``index_dir``, unless they are there and whole."""
    import torch

    if torch.distributed.is_initialized():
        logger.warning("the sample index is left to rank 0: torch.distributed runs already")
        return
    if _is_complete(index_dir):
        return
    lock = index_dir.with_suffix(".lock")
    with indexed_text.locked(lock, indexed_text.LOCK_TIMEOUT_S, "the same sample index"):
        if _is_complete(index_dir):
            return
        try:
            shutil.rmtree(index_dir, ignore_errors=True)
            index_dir.mkdir(parents=True)
            module.build(**_build_arguments(trainer))
            sizes = {file.name: file.stat().st_size for file in index_dir.iterdir()}
            (index_dir / _COMPLETE).write_text(json.dumps(sizes), encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"data.cache_dir: cannot write the sample index to {index_dir} "
                f"({error.strerror or error}); choose a folder with room that this user can write"
            ) from error


def _is_complete(index_dir: Path) -> bool:
    """Whether every file of a finished build is there with its size."""
    try:
        sizes = json.loads((index_dir / _COMPLETE).read_text(encoding="utf-8"))
        return bool(sizes) and all(
            (index_dir / name).stat().st_size == size for name, size in sizes.items()
        )
    except (OSError, ValueError, AttributeError):
        return False
