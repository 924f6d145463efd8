"""Whether all replicas hold bitwise the same parameters, for stock and uneven runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state


def replicas_equal(trainer: Any) -> bool | None:
    """Compare the parameters of all replicas. Collective; every rank gets the answer.

    ``None`` if there is only one replica.
    """
    chunks = list(trainer.strategy.megatron_parallel)
    plan = getattr(trainer.strategy, "plan", None)
    if plan is None or plan.is_uniform:
        _finish_parameter_gather(trainer, chunks)
        return _stock_replicas_equal(chunks)
    if plan.replicas == 1:
        return None
    from nemo_uneven_tp.replica_check import replicas_equal as uneven_replicas_equal

    return bool(uneven_replicas_equal(chunks, plan))


def _stock_replicas_equal(chunks: Iterable[torch.nn.Module]) -> bool | None:
    """Compare each rank with its data-parallel peers, then all ranks' findings."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if dist.get_world_size(group) == 1:
        return None
    device = torch.cuda.current_device()
    own = torch.tensor(list(_digest(chunks)), dtype=torch.uint8, device=device)
    peers = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(peers, own, group=group)
    differ = torch.tensor([not all(torch.equal(own, peer) for peer in peers)], dtype=torch.int32)
    differ = differ.to(own.device)
    dist.all_reduce(differ)
    return int(differ) == 0


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


def _finish_parameter_gather(trainer: Any, chunks: list[Any]) -> None:
    """With overlapped gathering, ranks hold old values of their peers' shards until used."""
    ddp_config = trainer.strategy.ddp_config
    if ddp_config.use_distributed_optimizer and ddp_config.overlap_param_gather:
        for chunk in chunks:
            chunk.module.start_param_sync(force_sync=True)
