"""Paired times: what is compared alternates in the same run, so drift hits both alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles

import torch.distributed as dist


def alternate(contestants: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, from all ranks' start to the last one's end.

    Every round runs all of them; the order turns around from round to round. One round more
    comes first and is not counted. Collective.
    """
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names if number % 2 else reversed(names):
            dist.barrier()
            start = time.perf_counter()
            contestants[name]()
            dist.barrier()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def paired_ratio(first: list[float], second: list[float]) -> float:
    """Median over rounds of the ratio ``first / second`` within a round."""
    return median(a / b for a, b in zip(first, second, strict=True))


def quartiles(first: list[float], second: list[float]) -> list[float]:
    """First and third quartile of the same ratios: how far to trust their median."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    lower, _, upper = quantiles(ratios, n=4)
    return [lower, upper]
