"""Are the replicas still bitwise equal? Cheap enough to ask every few steps.

Every rank hashes the bytes of each segment it holds (parameters and, where they are not
sharded, optimizer state); each sync group compares hashes in one small collective. Only if
some differ do ranks exchange them, to name parameter, segment and ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from nemo_uneven_tp.errors import UnevenTPError
from nemo_uneven_tp.parallel_state import UnevenState, get_state
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.segment_views import Piece, pieces_of

_CHUNK = 1 << 22
"""Elements hashed at a time: what a comparison costs in memory is 16 bytes each."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicasDifferError(UnevenTPError, RuntimeError):
    """Replicas no longer hold the same numbers; the message names what and where."""


def check_replicas(chunks: Iterable[torch.nn.Module], optimizer: Any = None) -> None:
    """Compare all replicas. Collective.

    Raises:
        ReplicasDifferError: on every rank, if any two replicas differ in a bit.
    """
    raise_if_any(find_differences(chunks, optimizer))


def raise_if_any(differences: list[str]) -> None:
    """Raise if there are differences.

    Raises:
        ReplicasDifferError: naming the first one and how many more there are.
    """
    if differences:
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        raise ReplicasDifferError(
            f"replicas differ in {differences[0]}{more}; ranks are numbered as in the undamaged "
            "job. A rank computes or sends wrongly, and the steps since the last comparison are in "
            "doubt"
        )


def find_differences(chunks: Iterable[torch.nn.Module], optimizer: Any = None) -> list[str]:
    """What differs between replicas, in words, the same list on every rank. Collective.

    Args:
        optimizer: Megatron's optimizer; its state is compared where every replica has all of it.
    """
    state = get_state()
    chunks = list(chunks)
    for chunk in chunks:
        ddp_config = getattr(chunk, "ddp_config", None)
        if getattr(ddp_config, "use_distributed_optimizer", False):
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
    found = []
    labelled = _by_group(chunks, optimizer, state)
    common = labelled.pop(())
    for ranks, entries in labelled.items():
        found += _compare(ranks, entries, state.sync_groups[ranks], state.plan)
    found += _compare(state.cell.ranks, common, state.tp_group, state.plan)
    anything = torch.tensor([len(found)], dtype=torch.int64, device=_device(chunks))
    dist.all_reduce(anything)
    if not int(anything):
        return []
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, found)
    return list(dict.fromkeys(text for texts in gathered for text in texts))


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit hash of the bytes of ``tensor``, as an int64 scalar.

    Sum of the elements' bit patterns times odd weights, modulo 2**64: no single flipped bit
    leaves it unchanged, and integer sums do not depend on their order.
    """
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start, start + part.numel(), dtype=torch.int64, device=bits.device)
        total += part.mul_(weights.mul_(0x9E3779B97F4A7C1).add_(0x1B873593).mul_(2).add_(1)).sum()
    return total


Entry = tuple[str, torch.Tensor]


def _by_group(
    chunks: list[torch.nn.Module], optimizer: Any, state: UnevenState
) -> dict[tuple[int, ...], list[Entry]]:
    """Labels and hashes per sync group; under ``()`` what a cell holds in common."""
    entries: dict[tuple[int, ...], list[Entry]] = {ranks: [] for ranks in state.sync_groups}
    entries[()] = []
    for name, param in _named(chunks):
        for what, tensor in _tensors_of(param, optimizer):
            for piece in pieces_of(state.plan, state.rank, name, param.shape):
                views = [fingerprint(view) for view in piece.views(tensor)]
                entry = (_label(what, piece), torch.stack(views).sum())
                if piece.segment is not None:
                    entries[piece.segment.owners].append(entry)
                    continue
                entries[()].append(entry)
                if state.is_leader:
                    entries[state.plan.leaders(state.cell.stage)].append(entry)
    return entries


def _named(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for chunk in chunks:
        for name, param in chunk.named_parameters():
            while name.startswith("module."):
                name = name.removeprefix("module.")
            yield name, param


def _tensors_of(param: torch.nn.Parameter, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield "parameter", param
    if optimizer is None:
        return
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        main = getattr(param, "main_param", param)
        if main is not param and main.shape == param.shape:
            yield "fp32 copy of", main
        state = part.optimizer.state.get(main, {}) if part.optimizer is not None else {}
        for key in sorted(state):
            value = state[key]
            if torch.is_tensor(value) and value.shape == param.shape:
                yield f"optimizer state {key} of", value


def _label(what: str, piece: Piece) -> str:
    return f"{what} {piece.describe()}"


def _compare(
    ranks: tuple[int, ...], entries: list[Entry], group: dist.ProcessGroup, plan: Plan
) -> list[str]:
    if not entries or len(ranks) < 2:
        return []
    own = torch.stack([value for _, value in entries])
    # Equal everywhere exactly if the largest value is the smallest; bitwise not mirrors order.
    extremes = torch.stack([own, ~own])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    differ = extremes[0] != ~extremes[1]
    if not bool(differ.any()):
        return []
    everyone = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(everyone, own, group=group)
    found = []
    nominal = [plan.nominal_rank(rank) for rank in ranks]
    for i in torch.nonzero(differ).flatten().tolist():
        values = [int(other[i]) for other in everyone]
        usual = max(set(values), key=values.count)
        odd = [rank for rank, value in zip(nominal, values, strict=True) if value != usual]
        if len(ranks) == 2:
            who = f"ranks {nominal[0]} and {nominal[1]}"
        else:
            who = f"ranks {nominal}; {odd} against the others"
        found.append(f"{entries[i][0]} between {who}")
    return found


def _device(chunks: list[torch.nn.Module]) -> torch.device:
    return next(chunks[0].parameters()).device
