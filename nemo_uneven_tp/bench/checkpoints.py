"""Saving and loading of checkpoints: bytes, and times against stock Megatron on as many ranks.

Both write and read as NeMo has them do: ``torch_dist``, fully parallel saves, and for stock
fully parallel loads. Ours also makes checksums after saving and compares them before loading.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from nemo_uneven_tp.bench.model import Trainee
from nemo_uneven_tp.bench.timed import paired_ratio, quartiles
from nemo_uneven_tp.checkpoint import stock_fixes, writers
from nemo_uneven_tp.checkpoint.files import WEIGHTS, files_of
from nemo_uneven_tp.checkpoint.stored import read_metadata, stored_tensors
from nemo_uneven_tp.checkpoint.together import damages_together, write_manifest_together
from nemo_uneven_tp.parallel_state import (
    destroy_uneven_model_parallel,
    initialize_uneven_model_parallel,
)
from nemo_uneven_tp.plan import Plan

THREADS = 2
"""Writers of each rank: NeMo's ``torch_dist_multiproc`` default."""


def compare(
    config: dict[str, Any], plan: Plan, stock: Plan, folder: Path, rounds: int
) -> dict[str, Any]:
    """Save and load in turn as ``plan`` has it and as ``stock``, its peer on as many ranks.

    One round more comes first and is not counted. Collective.

    Args:
        folder: on a disk that all ranks see.
    """
    stock_fixes.apply()
    writers.end_with_this_process()
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"save": [], "load": [], "checksums": []} for name in ("uneven_tp", "stock")
    }
    counts: dict[str, float] = {}
    for number in range(rounds + 1):
        names = ("uneven_tp", "stock") if number % 2 else ("stock", "uneven_tp")
        for name in names:
            place = folder / f"{name}-{number}"
            with _built(config, plan if name == "uneven_tp" else stock, name == "stock") as trainee:
                took = _save_and_load(config, trainee, place, name == "stock")
            if name == "uneven_tp" and not number:
                counts = _bytes(place)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(place)
            if number:
                for what, value in took.items():
                    seconds[name][what].append(value)
    return {"checkpoint": {**counts, **_times(seconds)}}


def _times(seconds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    ours, stock = seconds["uneven_tp"], seconds["stock"]
    report: dict[str, Any] = {"rounds": len(ours["save"])}
    for what in ("save", "load"):
        report[f"{what}_time_ratio_to_stock"] = paired_ratio(ours[what], stock[what])
        report[f"{what}_time_ratio_to_stock_quartiles"] = quartiles(ours[what], stock[what])
        report[f"{what}_s"] = {name: median(seconds[name][what]) for name in seconds}
    report["checksums_s"] = median(ours["checksums"])
    return report


def _bytes(place: Path) -> dict[str, float]:
    tensors = stored_tensors(read_metadata(place))
    state = sum(tensor.nbytes for tensor in tensors)
    written = sum((place / name).stat().st_size for name in files_of(place))
    return {
        "state_bytes": state,
        "file_bytes": written,
        "file_bytes_over_state": written / state,
    }


@contextmanager
def _built(config: dict[str, Any], plan: Plan, stock: bool) -> Iterator[Trainee]:
    """A model with an optimizer that has made a step."""
    state = initialize_uneven_model_parallel(plan)
    try:
        torch.manual_seed(config["seed"])
        model_parallel_cuda_manual_seed(config["seed"])
        trainee = Trainee(config, plan, state.cell.replica, stock=stock)
        trainee.step()
        yield trainee
    finally:
        destroy_uneven_model_parallel()


def _save_and_load(
    config: dict[str, Any], trainee: Trainee, place: Path, stock: bool
) -> dict[str, float]:
    """Seconds of each, from all ranks' start to the last one's end."""
    weights = place / WEIGHTS
    if dist.get_rank() == 0:
        weights.mkdir(parents=True)
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if config["optim"]["use_distributed_optimizer"]:
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False

    started = _now()
    writer = FullyParallelSaveStrategyWrapper(
        TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=THREADS)
    )
    dist_checkpointing.save(
        _sharded(trainee, metadata, is_loading=False),
        str(weights),
        sharded_strategy=writer,
        content_metadata=metadata,
    )
    saved = written = _now()
    if not stock:
        write_manifest_together(place, {})
        saved = _now()

    found = [] if stock else damages_together(place)
    if found:
        raise RuntimeError(f"a checkpoint just written is damaged: {found[0]}")
    checked = _now()
    reader: Any = get_default_load_sharded_strategy(str(weights))
    if stock:
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        reader = FullyParallelLoadStrategyWrapper(reader, group)
    wanted = _sharded(trainee, metadata, is_loading=True)
    loaded = dist_checkpointing.load(wanted, str(weights), sharded_strategy=reader)
    model = {k: v for k, v in loaded["state_dict"].items() if isinstance(v, torch.Tensor)}
    trainee.model.load_state_dict(model)
    trainee.optimizer.load_state_dict(loaded["optimizer"][0])
    ended = _now()
    return {
        "save": saved - started,
        "load": ended - saved,
        "checksums": checked - written,
    }


def _sharded(trainee: Trainee, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    state = trainee.model.sharded_state_dict(metadata=metadata)
    described = {k: v for k, v in state.items() if not k.endswith("_extra_state")}
    optimizer = trainee.optimizer.sharded_state_dict(
        described, is_loading=is_loading, metadata=metadata
    )
    return {"state_dict": state, "optimizer": [optimizer]}


def _now() -> float:
    """The time when all ranks have come here."""
    dist.barrier()
    return time.perf_counter()
