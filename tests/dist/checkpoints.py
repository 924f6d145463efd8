"""What the ranks of the checkpoint tests do: train, save, load in another layout, train on."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.managers import SyncManager
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from nemo_uneven_tp import cpu_mode, processes
from nemo_uneven_tp.batch import assign_micro_batches
from nemo_uneven_tp.checkpoint import stock_fixes
from nemo_uneven_tp.parallel_state import (
    destroy_uneven_model_parallel,
    get_state,
    initialize_uneven_model_parallel,
)
from nemo_uneven_tp.plan import Plan
from tests.dist.parity import Case, build_stock, build_uneven, local, train


@dataclass(frozen=True)
class Layout:
    """A way to run a case: stock at one degree, or uneven."""

    degrees: tuple[int, ...]
    stock: bool = False
    distributed: bool = False

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return sum(self.degrees)

    def __str__(self) -> str:
        name = "stock" if self.stock else "uneven"
        return f"{name}{list(self.degrees)}{'dist' if self.distributed else ''}".replace(" ", "")


@dataclass(frozen=True)
class Part:
    """Steps ``[first, last)`` of a job, with what is read and written.

    ``copy`` is written right after reading ``load``: what was read, in this layout. ``save``
    is written before step ``save_at``; if ``asynchronous``, while that step is trained.
    """

    first: int
    last: int
    load: str | None = None
    copy: str | None = None
    save: str | None = None
    save_at: int = 0
    parallel: bool = True
    asynchronous: bool = False


def run_part(case: Case, layout: Layout, part: Part) -> dict[str, Any]:
    """Train ``part`` of the job in ``layout``, as one of its ranks."""
    cpu_mode.activate()
    case = replace(
        case, degrees=layout.degrees, distributed_optimizer=layout.distributed, steps=part.last
    )
    with _built(case, layout) as (built, micro_batches, plan):
        _, model, _, optimizer = built
        read = {"read_bytes": 0, "needed_bytes": 0}
        if part.load:
            read = load(part.load, case, model, optimizer, part.parallel and layout.stock)
        if part.copy:
            save(part.copy, case, model, optimizer, part.parallel)
        saved: dict[str, torch.Tensor] = {}
        calls = AsyncCallsQueue()

        def before_step(step: int) -> None:
            if part.save and step == part.save_at:
                request = save(part.save, case, model, optimizer, part.parallel, part.asynchronous)
                if part.asynchronous:
                    calls.schedule_async_request(request)
                saved.update(local(model))

        def after_step(step: int) -> None:
            if part.asynchronous and step == part.save_at:
                calls.maybe_finalize_async_calls(blocking=True)

        first = part.first
        report = train(case, *built, micro_batches, plan, before_step, after_step, first)
        return {**report, "saved": saved, **read}


@contextmanager
def _built(
    case: Case, layout: Layout
) -> Iterator[tuple[tuple[Any, Any, Any, Any], list[int], Plan | None]]:
    if layout.stock:
        stock_fixes.apply()
        (degree,) = set(layout.degrees)
        mpu.initialize_model_parallel(tensor_model_parallel_size=degree)
        try:
            replica, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
            count = case.global_batch_size // case.micro_batch_size
            yield (
                build_stock(case, degree, layout.distributed),
                list(range(replica, count, replicas)),
                None,
            )
        finally:
            mpu.destroy_model_parallel()
        return
    plan = case.plan()
    initialize_uneven_model_parallel(plan)
    try:
        mine = list(assign_micro_batches(plan.micro_batches)[get_state().cell.replica])
        yield build_uneven(case), mine, plan
    finally:
        destroy_uneven_model_parallel()


def _metadata(case: Case) -> dict[str, Any]:
    """The content metadata NeMo writes."""
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if case.distributed_optimizer:
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    return metadata


def _sharded(
    case: Case, model: Any, optimizer: Any, is_loading: bool, metadata: dict[str, Any]
) -> dict[str, Any]:
    state = {"state_dict": model.sharded_state_dict(metadata=metadata)}
    described = {k: v for k, v in state["state_dict"].items() if not k.endswith("_extra_state")}
    state["optimizer"] = [
        optimizer.sharded_state_dict(described, is_loading=is_loading, metadata=metadata)
    ]
    return state


def save(
    folder: str,
    case: Case,
    model: Any,
    optimizer: Any,
    parallel: bool,
    asynchronous: bool = False,
) -> Any:
    """Write a checkpoint as NeMo does; returns Megatron's request to do so if asynchronous."""
    _allow_writers(asynchronous)
    metadata = _metadata(case)
    strategy: Any = TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1)
    if parallel:
        strategy = FullyParallelSaveStrategyWrapper(strategy)
    return dist_checkpointing.save(
        _sharded(case, model, optimizer, False, metadata),
        folder,
        sharded_strategy=strategy,
        async_sharded_save=asynchronous,
        content_metadata=metadata,
    )


def _allow_writers(asynchronous: bool) -> None:
    """Let a process of the pool, a daemon, fork writers; a server for results if it must be."""
    processes.forked_children_die_with_us()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    results: Any = queue.Queue()
    if asynchronous:
        manager = SyncManager(ctx=multiprocessing.get_context("fork"))
        manager.start()
        results = manager.Queue()
        results.manager = manager  # lives as long as its queue
    filesystem_async._results_queue = results


def load(folder: str, case: Case, model: Any, optimizer: Any, parallel: bool) -> dict[str, int]:
    """Read a checkpoint as NeMo does; returns bytes of chunks read and of tensors wanted."""
    metadata = dist_checkpointing.load_content_metadata(folder)
    strategy = get_default_load_sharded_strategy(folder)
    if parallel:
        strategy = FullyParallelLoadStrategyWrapper(
            strategy, mpu.get_data_parallel_group(with_context_parallel=True)
        )
    wanted = _sharded(case, model, optimizer, True, metadata)
    with _counting_reads() as counts:
        loaded = dist_checkpointing.load(wanted, folder, sharded_strategy=strategy)
    model.load_state_dict(
        {k: v for k, v in loaded["state_dict"].items() if isinstance(v, torch.Tensor)}
    )
    optimizer.load_state_dict(loaded["optimizer"][0])
    return counts


@contextmanager
def _counting_reads() -> Iterator[dict[str, int]]:
    """Bytes of stored chunks that are opened, each once, and of their parts that are wanted."""
    counts = {"read_bytes": 0, "needed_bytes": 0}
    stock = FileSystemReader.read_data

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        chunks = {}
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                stored = planner.metadata.state_dict_metadata[item.storage_index.fqn]
                size = stored.properties.dtype.itemsize
                (chunk,) = [c for c in stored.chunks if c.offsets == item.storage_index.offset]
                chunks[item.storage_index] = chunk.sizes.numel() * size
                counts["needed_bytes"] += item.lengths.numel() * size
        counts["read_bytes"] += sum(chunks.values())
        return stock(self, plan, planner)

    FileSystemReader.read_data = read_data  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        FileSystemReader.read_data = stock  # type: ignore[method-assign]


def chunk_bytes(folder: str) -> dict[str, int]:
    """Bytes of the stored chunks of each rank, by the prefix of its files."""
    metadata = FileSystemReader(folder).read_metadata()
    found: dict[str, int] = {}
    for index, where in metadata.storage_data.items():
        stored = metadata.state_dict_metadata[index.fqn]
        if isinstance(stored, TensorStorageMetadata):
            (chunk,) = [c for c in stored.chunks if c.offsets == index.offset]
            rank = where.relative_path.split("_")[2]
            found.setdefault(rank, 0)
            found[rank] += chunk.sizes.numel() * stored.properties.dtype.itemsize
    return found


def plain(folder: str) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, as stock Megatron reads it."""
    cpu_mode.activate()
    loaded = dist_checkpointing.load_plain_tensors(folder)
    return {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}
