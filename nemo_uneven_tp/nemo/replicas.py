"""Whether all replicas hold bitwise the same parameters, for stock and uneven runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_uneven_tp.replica_check import find_differences, raise_if_any


def differences(trainer: Any) -> list[str] | None:
    """Compare the parameters of all replicas and say what differs, the same on every rank.

    Collective. ``None`` if there is only one replica.
    """
    chunks = [chunk.module for chunk in trainer.strategy.megatron_parallel]
    plan = getattr(trainer.strategy, "plan", None)
    if plan is None:
        return _stock_differences(chunks)
    if plan.replicas == 1:
        return None
    return find_differences(chunks, getattr(trainer.optimizers[0], "mcore_optimizer", None))


def check(trainer: Any) -> None:
    """Compare the replicas. Collective.

    Raises:
        ReplicasDifferError: on every rank, naming what differs and where.
    """
    raise_if_any(differences(trainer) or [])


def replicas_equal(trainer: Any) -> bool | None:
    """Whether all replicas hold the same parameters; ``None`` if there is only one."""
    found = differences(trainer)
    return None if found is None else not found


def _stock_differences(chunks: list[Any]) -> list[str] | None:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if dist.get_world_size(group) == 1:
        return None
    for chunk in chunks:
        if chunk.ddp_config.use_distributed_optimizer and chunk.ddp_config.overlap_param_gather:
            # Until the next forward, ranks may hold old values of their peers' shards.
            chunk.start_param_sync(force_sync=True)
    own = torch.tensor(list(_digest(chunks)), dtype=torch.uint8, device=torch.cuda.current_device())
    peers = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(peers, own, group=group)
    differ = torch.zeros(1, dtype=torch.int32, device=own.device)
    differ += not all(torch.equal(own, peer) for peer in peers)
    dist.all_reduce(differ)
    ranks = int(differ)
    return [f"the parameters of {ranks} ranks and their data-parallel peers"] if ranks else []


def _digest(chunks: Iterable[torch.nn.Module]) -> bytes:
    """SHA-256 over the bytes of all parameters that data-parallel peers share."""
    digest = hashlib.sha256()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if not getattr(parameter, "allreduce", True):
                continue  # an expert's: its peers are other ranks
            digest.update(name.encode())
            flat = parameter.detach().contiguous().view(-1).view(torch.uint8)
            digest.update(flat.cpu().numpy().data)
    return digest.digest()
