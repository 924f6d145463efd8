"""Extension of Megatron-Core's ``parallel_state`` to cells of different degrees.

:func:`initialize_uneven_model_parallel` takes the place of
``parallel_state.initialize_model_parallel``. If all degrees are equal it calls exactly that;
otherwise it fills every group Megatron and NeMo ask for itself. Megatron leaves no door for
a layout that isn't a hyper-rectangle, so its module globals are set here, in one place, and
only for names that the installed version has.

What the groups mean in an uneven layout:

* tensor, model, expert-tensor: the cell;
* data: for tensor-parallel rank i, the i-th rank of every cell if all cells have one, else
  the rank alone. Nothing may reduce gradients or scalars over it: use :func:`get_state`;
* data-parallel rank and size: the replica and the number of replicas;
* tensor x data and the distributed-optimizer instance: the world.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from nemo_uneven_tp.plan import Cell, Plan


@dataclass(frozen=True, slots=True)
class UnevenState:
    """The plan as seen from this rank, with its process groups.

    ``sync_groups`` maps the ranks of each sync group this rank belongs to, in the plan's
    order, to its process group. ``leaders`` is the group of the first ranks of all cells of
    this stage (``None`` on the others).
    """

    plan: Plan
    rank: int
    cell: Cell
    tp_rank: int
    tp_group: dist.ProcessGroup
    sync_groups: dict[tuple[int, ...], dist.ProcessGroup]

    @property
    def is_leader(self) -> bool:
        """Whether this is the first rank of its cell."""
        return self.tp_rank == 0

    @property
    def leaders(self) -> dist.ProcessGroup | None:
        """Group of the first ranks of all cells of this stage, ``None`` on other ranks."""
        return self.sync_groups[self.plan.leaders(self.cell.stage)] if self.is_leader else None


_STATE: UnevenState | None = None


def get_state() -> UnevenState:
    """The state set by :func:`initialize_uneven_model_parallel`.

    Raises:
        RuntimeError: if it has not been called.
    """
    if _STATE is None:
        raise RuntimeError("uneven model parallelism is not initialized")
    return _STATE


def is_initialized() -> bool:
    """Whether :func:`initialize_uneven_model_parallel` has been called."""
    return _STATE is not None


def initialize_uneven_model_parallel(
    plan: Plan,
    *,
    timeout_s: float | None = None,
    create_gloo_process_groups: bool = True,
    **stock_options: Any,
) -> UnevenState:
    """Create and register all process groups of ``plan``.

    ``torch.distributed`` must be initialized with ``plan.world_size`` ranks. A rank
    communicates only with the members of its own groups, so it pays for those and not for
    the size of the job.

    Args:
        timeout_s: time limit of collectives in seconds (default: torch's).
        create_gloo_process_groups: as in ``initialize_model_parallel``.
        stock_options: passed to ``initialize_model_parallel`` when all degrees are equal.
    """
    global _STATE
    rank = dist.get_rank()
    if dist.get_world_size() != plan.world_size:
        raise ValueError(
            f"the plan has {plan.world_size} ranks, torch.distributed {dist.get_world_size()}"
        )
    cell, tp_rank = plan.location(rank)
    mpu.destroy_model_parallel()
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    if plan.same_shares:
        if timeout_s is not None:
            stock_options.setdefault("distributed_timeout_minutes", math.ceil(timeout_s / 60))
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=cell.degree,
            create_gloo_process_groups=create_gloo_process_groups,
            **stock_options,
        )
        peers = tuple(other.ranks[tp_rank] for other in plan.cells)
        groups = {
            cell.ranks: mpu.get_tensor_model_parallel_group(),
            peers: mpu.get_data_parallel_group(with_context_parallel=True),
        }
    else:
        groups = _create_groups(plan, rank, timeout)
        _install(plan, cell, tp_rank, groups, timeout, create_gloo_process_groups)
    sync_groups = {
        group.ranks: groups[group.ranks] for group in plan.sync_groups if rank in group.ranks
    }
    _STATE = UnevenState(plan, rank, cell, tp_rank, groups[cell.ranks], sync_groups)
    return _STATE


def destroy_uneven_model_parallel() -> None:
    """Forget the state and Megatron's groups, as ``destroy_model_parallel`` does.

    Also clears the globals that Megatron's own function leaves behind.
    """
    global _STATE
    _STATE = None
    mpu.destroy_model_parallel()
    for name in ("_MPU_DATA_PARALLEL_RANK", "_MPU_DATA_PARALLEL_WORLD_SIZE"):
        setattr(mpu, name, None)


def group_ranks(plan: Plan) -> list[tuple[int, ...]]:
    """The ranks of every group of more than one rank, each once, in the order of creation.

    All ranks create all of them in this order (torch numbers groups by it); a rank that is
    not a member returns at once, without communication.
    """
    wanted = [cell.ranks for cell in plan.cells]
    wanted += [group.ranks for group in plan.sync_groups]
    wanted += [_data_parallel_ranks(plan, i) for i in range(min(plan.degrees))]
    return [ranks for ranks in dict.fromkeys(wanted) if len(ranks) > 1]


def _data_parallel_ranks(plan: Plan, tp_rank: int) -> tuple[int, ...]:
    return tuple(cell.ranks[tp_rank] for cell in plan.cells)


def _create_groups(
    plan: Plan, rank: int, timeout: timedelta | None
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    groups = {}
    for ranks in group_ranks(plan):
        group = mpu.create_group(list(ranks), timeout=timeout, group_desc="UNEVEN_TP_GROUP")
        if rank in ranks:
            groups[ranks] = group
    # Of one rank: no other rank needs to know of it.
    groups[(rank,)] = mpu.create_group(
        [rank], timeout=timeout, use_local_synchronization=True, group_desc="UNEVEN_TP_SELF_GROUP"
    )
    return groups


def _install(
    plan: Plan,
    cell: Cell,
    tp_rank: int,
    groups: dict[tuple[int, ...], dist.ProcessGroup],
    timeout: timedelta | None,
    create_gloo: bool,
) -> None:
    rank = cell.ranks[tp_rank]
    tp_group, alone = groups[cell.ranks], groups[(rank,)]
    has_peers = tp_rank < min(plan.degrees)
    peers = _data_parallel_ranks(plan, tp_rank) if has_peers else (rank,)
    data_parallel = groups[peers]
    gloo = data_parallel if dist.get_backend() == "gloo" else None
    if create_gloo and gloo is None:
        for i in range(min(plan.degrees)):
            ranks = list(_data_parallel_ranks(plan, i))
            group = mpu.create_group(ranks, timeout=timeout, backend="gloo")
            gloo = group if rank in ranks else gloo
    world = dist.group.WORLD
    cell_ranks = list(cell.ranks)
    values: dict[str, Any] = {
        "_TENSOR_MODEL_PARALLEL_GROUP": tp_group,
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": cell_ranks,
        "_MODEL_PARALLEL_GROUP": tp_group,
        "_MODEL_PARALLEL_GLOBAL_RANKS": cell_ranks,
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": tp_group,
        "_EXPERT_TENSOR_PARALLEL_GROUP": tp_group,
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": tp_group,
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": tp_group,
        "_PIPELINE_MODEL_PARALLEL_GROUP": alone,
        "_PIPELINE_GLOBAL_RANKS": [rank],
        "_EMBEDDING_GROUP": alone,
        "_EMBEDDING_GLOBAL_RANKS": [rank],
        "_POSITION_EMBEDDING_GROUP": alone,
        "_POSITION_EMBEDDING_GLOBAL_RANKS": [rank],
        "_CONTEXT_PARALLEL_GROUP": alone,
        "_CONTEXT_PARALLEL_GLOBAL_RANKS": [rank],
        "_EXPERT_MODEL_PARALLEL_GROUP": alone,
        "_EXPERT_MODEL_PARALLEL_RANKS": [rank],
        "_TENSOR_AND_DATA_PARALLEL_GROUP": world,
        "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": world,
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": world,
        "_MPU_DATA_PARALLEL_RANK": cell.replica,
        "_MPU_DATA_PARALLEL_WORLD_SIZE": plan.replicas,
    }
    for name in (
        "_DATA_PARALLEL_GROUP",
        "_DATA_PARALLEL_GROUP_WITH_CP",
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
        "_EXPERT_DATA_PARALLEL_GROUP",
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
    ):
        values[name] = data_parallel
        values[f"{name}_GLOO"] = gloo
    for name in ("_DATA_PARALLEL_GLOBAL_RANKS", "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"):
        values[name] = list(peers)
    for name, value in values.items():
        if hasattr(mpu, name):
            setattr(mpu, name, value)
    mpu._set_global_memory_buffer()  # noqa: SLF001 - what initialize_model_parallel ends with
