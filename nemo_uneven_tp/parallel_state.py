"""Extension of Megatron-Core's ``parallel_state`` to cells of different degrees.

:func:`initialize_uneven_model_parallel` takes the place of
``parallel_state.initialize_model_parallel``. If all degrees are equal it calls exactly that;
otherwise it fills every group Megatron and NeMo ask for itself. Megatron leaves no door for
a layout that isn't a hyper-rectangle, so its module globals are set here, in one place, and
only for names that the installed version has.

What the groups mean in an uneven layout:

* tensor, expert-tensor: the cell; model: all ranks of the replica;
* pipeline: for tensor-parallel rank i, the i-th rank (or the last) of every stage of the
  replica. Its rank and size are stage and number of stages, but ranks of smaller cells are in
  several such groups, so no collective may run over it;
* embedding: the rank alone; tied weights meet in sync groups;
* data: for tensor-parallel rank i, the i-th rank of every cell of the stage if all cells have
  one, else the rank alone. Nothing may reduce gradients or scalars over it: use
  :func:`get_state`;
* data-parallel rank and size: the replica and the number of replicas;
* tensor x data and the distributed-optimizer instance: the world.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from nemo_uneven_tp.plan import Cell, Plan


@dataclass(frozen=True, slots=True)
class UnevenState:
    """The plan as seen from this rank, with its process groups.

    ``sync_groups`` maps the ranks of each sync group this rank belongs to, in the plan's
    order, to its process group. ``leaders`` is the group of the first ranks of all cells of
    this stage (``None`` on the others). ``boundaries[p]`` is the group of the ranks of stage p
    and the following one in this replica, if this rank is one of them and stock Megatron can't
    pass activations between them.
    """

    plan: Plan
    rank: int
    cell: Cell
    tp_rank: int
    tp_group: dist.ProcessGroup
    sync_groups: dict[tuple[int, ...], dist.ProcessGroup]
    boundaries: dict[int, dist.ProcessGroup] = field(default_factory=dict)

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
            pipeline_model_parallel_size=plan.stages,
            virtual_pipeline_model_parallel_size=plan.virtual_pipeline_model_parallel_size,
            create_gloo_process_groups=create_gloo_process_groups,
            **stock_options,
        )
        peers = tuple(other.ranks[tp_rank] for other in plan.cells_of_stage(cell.stage))
        groups = {
            cell.ranks: mpu.get_tensor_model_parallel_group(),
            peers: mpu.get_data_parallel_group(with_context_parallel=True),
        }
        across = [g.ranks for g in plan.sync_groups if len(g.ranks) > plan.replicas]
        groups |= _create(across, rank, timeout)
    else:
        groups = _create_groups(plan, rank, timeout)
        _install(plan, cell, tp_rank, groups, timeout, create_gloo_process_groups)
    sync_groups = {
        group.ranks: groups[group.ranks] for group in plan.sync_groups if rank in group.ranks
    }
    boundaries = {} if plan.has_stock_pipeline else _create_boundaries(plan, rank, timeout)
    _STATE = UnevenState(plan, rank, cell, tp_rank, groups[cell.ranks], sync_groups, boundaries)
    return _STATE


def destroy_uneven_model_parallel() -> None:
    """Forget the state and Megatron's groups, as ``destroy_model_parallel`` does.

    Also clears the globals that Megatron's own function leaves behind.
    """
    global _STATE
    _STATE = None
    mpu.destroy_model_parallel()
    for name in (
        "_MPU_DATA_PARALLEL_RANK",
        "_MPU_DATA_PARALLEL_WORLD_SIZE",
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    ):
        setattr(mpu, name, None)


def group_ranks(plan: Plan) -> list[tuple[int, ...]]:
    """The ranks of every group of more than one rank, each once, in the order of creation.

    All ranks create all of them in this order (torch numbers groups by it); a rank that is
    not a member returns at once, without communication.
    """
    wanted = [cell.ranks for cell in plan.cells]
    wanted += [group.ranks for group in plan.sync_groups]
    wanted += [
        _data_parallel_ranks(plan, stage, i)
        for stage in range(plan.stages)
        for i in range(_smallest(plan, stage))
    ]
    if plan.stages > 1:
        for replica in range(plan.replicas):
            cells = plan.cells_of_replica(replica)
            wanted.append(tuple(rank for cell in cells for rank in cell.ranks))
            most = max(cell.degree for cell in cells)
            wanted += [_pipeline_ranks(plan, replica, i) for i in range(most)]
    return [ranks for ranks in dict.fromkeys(wanted) if len(ranks) > 1]


def _data_parallel_ranks(plan: Plan, stage: int, tp_rank: int) -> tuple[int, ...]:
    return tuple(cell.ranks[tp_rank] for cell in plan.cells_of_stage(stage))


def _smallest(plan: Plan, stage: int) -> int:
    return min(cell.degree for cell in plan.cells_of_stage(stage))


def _pipeline_ranks(plan: Plan, replica: int, tp_rank: int) -> tuple[int, ...]:
    cells = plan.cells_of_replica(replica)
    return tuple(cell.ranks[min(tp_rank, cell.degree - 1)] for cell in cells)


def _create(
    wanted: Iterable[tuple[int, ...]], rank: int, timeout: timedelta | None
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    groups = {}
    for ranks in wanted:
        group = mpu.create_group(list(ranks), timeout=timeout, group_desc="UNEVEN_TP_GROUP")
        if rank in ranks:
            groups[ranks] = group
    return groups


def _create_boundaries(
    plan: Plan, rank: int, timeout: timedelta | None
) -> dict[int, dist.ProcessGroup]:
    """Groups for activations: one per replica and two neighbouring stages."""
    found = {}
    for replica in range(plan.replicas):
        cells = plan.cells_of_replica(replica)
        for stage in plan.boundaries:
            ranks = sorted(cells[stage].ranks + cells[(stage + 1) % plan.stages].ranks)
            group = mpu.create_group(ranks, timeout=timeout, group_desc="UNEVEN_TP_BOUNDARY")
            if rank in ranks:
                found[stage] = group
    if dist.get_backend() == "nccl":
        # NCCL wants all members in a group's first call; not all take part in each exchange.
        for group in found.values():
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return found


def _create_groups(
    plan: Plan, rank: int, timeout: timedelta | None
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    groups = _create(group_ranks(plan), rank, timeout)
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
    has_peers = tp_rank < _smallest(plan, cell.stage)
    peers = _data_parallel_ranks(plan, cell.stage, tp_rank) if has_peers else (rank,)
    data_parallel = groups[peers]
    gloo = data_parallel if dist.get_backend() == "gloo" else None
    if create_gloo and gloo is None:
        for stage in range(plan.stages):
            for i in range(_smallest(plan, stage)):
                ranks = list(_data_parallel_ranks(plan, stage, i))
                group = mpu.create_group(ranks, timeout=timeout, backend="gloo")
                gloo = group if rank in ranks else gloo
    world = dist.group.WORLD
    cell_ranks = list(cell.ranks)
    replica_ranks = tuple(r for c in plan.cells_of_replica(cell.replica) for r in c.ranks)
    pipeline = _pipeline_ranks(plan, cell.replica, tp_rank)
    values: dict[str, Any] = {
        "_TENSOR_MODEL_PARALLEL_GROUP": tp_group,
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": cell_ranks,
        "_MODEL_PARALLEL_GROUP": groups[replica_ranks],
        "_MODEL_PARALLEL_GLOBAL_RANKS": list(replica_ranks),
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": tp_group,
        "_EXPERT_TENSOR_PARALLEL_GROUP": tp_group,
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": tp_group,
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": groups[replica_ranks],
        "_PIPELINE_MODEL_PARALLEL_GROUP": groups[pipeline],
        "_PIPELINE_GLOBAL_RANKS": list(pipeline),
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
    if plan.virtual_pipeline_model_parallel_size is not None:
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = (
            plan.virtual_pipeline_model_parallel_size
        )
    for name, value in values.items():
        if hasattr(mpu, name):
            setattr(mpu, name, value)
    mpu._set_global_memory_buffer()  # noqa: SLF001 - what initialize_model_parallel ends with
