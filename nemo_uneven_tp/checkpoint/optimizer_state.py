"""What of our distributed optimizer goes into a checkpoint, and how it comes back.

The parts that all ranks share (parameter groups, step, loss scale) have the form stock
Megatron's ``DistributedOptimizer`` gives them, and the tensors its ``fully_reshardable``
format (:mod:`.shards`), so the two read each other's checkpoints.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.optimizer import param_group_identifier_keys

from nemo_uneven_tp.checkpoint.shards import FORMAT, MAIN, PREFIX, fill, sharded_tensors
from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.parallel_state import get_state
from nemo_uneven_tp.sharded_sync import OptimizerShard

FORMAT_KEY = "distrib_optim_sharding_type"
"""Megatron's name for the format in the metadata of a checkpoint."""


class ShardedOptimizer(Protocol):
    """What this module needs of an optimizer."""

    optimizer: torch.optim.Optimizer
    config: Any
    init_state_fn: Any
    grad_scaler: Any
    shards: list[OptimizerShard]
    mains: list[list[torch.Tensor]]


def sharded_state(
    optimizer: ShardedOptimizer,
    model_sharded_state_dict: dict[str, Any],
    metadata: dict[str, Any] | None,
) -> dict[str, Any]:
    """The optimizer's sharded state dict, to be written or to be filled.

    Raises:
        UserError: if the checkpoint to be read has a format that only its own layout can read.
    """
    stored = (metadata or {}).get(FORMAT_KEY, FORMAT)
    if stored != FORMAT:
        raise UserError(
            f"the optimizer state of the checkpoint has the format {stored}, which only the layout "
            "that wrote it can read; save it once more there with the strategy's "
            "ckpt_optim_fully_reshardable=True"
        )
    initialize_states(optimizer)
    state: dict[str, Any] = {
        "param_state": _sharded_parts(optimizer, model_sharded_state_dict),
        "param_state_sharding_type": FORMAT,
    }
    groups = [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.optimizer.param_groups
    ]
    step = step_of(optimizer)
    for group in groups:
        group["step"] = step
    state["optimizer"] = {"param_groups": groups}
    if optimizer.grad_scaler:
        state["grad_scaler"] = optimizer.grad_scaler.state_dict()
    return state


def load_state(optimizer: ShardedOptimizer, state: dict[str, Any]) -> None:
    """Load what became of :func:`sharded_state` once a checkpoint was read into it.

    Raises:
        UserError: if the checkpoint lacks one of the optimizer's parameter groups.
    """
    mains = [main for shard in optimizer.mains for main in shard]
    with torch.no_grad():
        for main, loaded in zip(mains, state["param_state"], strict=True):
            for name, elements in _state_of(optimizer, main).items():
                fill(elements, loaded[name])
    _load_groups(optimizer, state["optimizer"]["param_groups"])
    if optimizer.grad_scaler and "grad_scaler" in state:
        optimizer.grad_scaler.load_state_dict(state["grad_scaler"])


def initialize_states(optimizer: ShardedOptimizer) -> None:
    """Give every main parameter the state it has after steps, as zeros."""
    inner = optimizer.optimizer
    if optimizer.init_state_fn is not None:
        optimizer.init_state_fn(inner, optimizer.config)
    for group in inner.param_groups:
        for main in group["params"]:
            state = inner.state[main]
            if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
                state.setdefault("step", torch.tensor(0.0))
            elif group.get("momentum") and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(main)


def step_of(optimizer: ShardedOptimizer) -> float:
    """How many steps the optimizer has taken."""
    inner = optimizer.optimizer
    for state in inner.state.values():
        if "step" in state:
            return float(state["step"])
    return float(inner.param_groups[0].get("step", 0.0))


def _state_of(optimizer: ShardedOptimizer, main: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that belong to each element of a main parameter, by Megatron's names."""
    state = optimizer.optimizer.state[main]
    tensors = {k: v for k, v in state.items() if k != "step" and isinstance(v, torch.Tensor)}
    return {MAIN: main, **tensors}


def _sharded_parts(
    optimizer: ShardedOptimizer, model_sharded_state_dict: dict[str, Any]
) -> list[dict[str, list[ShardedTensor]]]:
    """For each overlap of a shard with a piece, the places of its tensors on disk."""
    plan = get_state().plan
    entries = {
        id(entry.data): entry
        for entry in nested_values(model_sharded_state_dict)
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory))
    }
    found = []
    for shard, mains in zip(optimizer.shards, optimizer.mains, strict=True):
        for (param, piece, _, in_piece), main in zip(shard.parts(), mains, strict=True):
            entry = entries[id(param)]
            found.append(
                {
                    name: sharded_tensors(
                        piece, in_piece, value, entry, f"{PREFIX}.{name}.{entry.key}", plan
                    )
                    for name, value in _state_of(optimizer, main).items()
                }
            )
    return found


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    # NeMo's scheduler puts "pre_" before some of these names.
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in param_group_identifier_keys)


def _load_groups(optimizer: ShardedOptimizer, loaded: list[dict[str, Any]]) -> None:
    by_identity = {_identity(group): group for group in loaded}
    inner = optimizer.optimizer
    for group in inner.param_groups:
        found = by_identity.get(_identity(group))
        if found is None:
            raise UserError(
                f"the checkpoint has no optimizer parameter group {_identity(group)} (of "
                f"{', '.join(param_group_identifier_keys)}); resume with the optimizer settings "
                "it was written with"
            )
        step = found.get("step")
        group.update({k: v for k, v in found.items() if k not in ("params", "step")})
        if step is None:
            continue
        if "step" in group:
            group["step"] = step
        for main in group["params"]:
            if "step" in inner.state[main]:
                inner.state[main]["step"] = torch.tensor(float(step))
