"""Counts what a rank hands to collectives, by kind and group.

Wraps the methods of ``torch.distributed.ProcessGroup`` themselves, so calls are seen whoever
makes them and under whatever name it imported them. Exact: elements times element size, for
one pass: the whole input of an all-reduce, reduce-scatter or broadcast, the whole output of
an all-gather.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Call:
    """One collective: its kind, the global ranks of its group, payload in bytes."""

    kind: str
    ranks: tuple[int, ...]
    nbytes: int


@dataclass(slots=True)
class Traffic:
    """The collectives of one rank, in order."""

    calls: list[Call] = field(default_factory=list)

    def nbytes(self, kind: str | None = None, ranks: tuple[int, ...] | None = None) -> int:
        """Bytes of all calls of ``kind`` (default: any) in the group ``ranks`` (default: any)."""
        return sum(call.nbytes for call in self.select(kind, ranks))

    def select(self, kind: str | None = None, ranks: tuple[int, ...] | None = None) -> list[Call]:
        """Calls of ``kind`` in the group ``ranks``."""
        return [
            call for call in self.calls if kind in (None, call.kind) and ranks in (None, call.ranks)
        ]


# Method of ProcessGroup -> (kind, index of the argument that holds the payload). Torch has
# renamed some: ``_allgather_base`` is ``all_gather_single`` from 2.13 on.
_METHODS: dict[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 0),
    "_allgather_base": ("all_gather", 0),
    "all_gather_single": ("all_gather", 0),
    "allgather_into_tensor_coalesced": ("all_gather", 0),
    "all_gather_single_coalesced": ("all_gather", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "send": ("send", 0),
}


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """While active, every collective this process enters is counted."""
    traffic = Traffic()
    saved: dict[str, Any] = {}
    for name, (kind, index) in _METHODS.items():
        if name in vars(dist.ProcessGroup):
            saved[name] = vars(dist.ProcessGroup)[name]
            original = getattr(dist.ProcessGroup, name)
            setattr(dist.ProcessGroup, name, _counting(original, kind, index, traffic))
    try:
        yield traffic
    finally:
        for name, original in saved.items():
            setattr(dist.ProcessGroup, name, original)


def _counting(
    original: Callable[..., Any], kind: str, index: int, traffic: Traffic
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        payload = args[index] if len(args) > index else None
        ranks = tuple(dist.get_process_group_ranks(group))
        traffic.calls.append(Call(kind, ranks, _nbytes(payload)))
        return original(group, *args, **kwargs)

    return call


def _nbytes(payload: Any) -> int:
    if torch.is_tensor(payload):
        return payload.numel() * payload.element_size()
    if isinstance(payload, (list, tuple)):
        return sum(_nbytes(part) for part in payload)
    return 0
