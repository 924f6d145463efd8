"""Which micro-batches of a global batch each replica computes (pure).

The global batch and the order of samples never change; only who computes what does. The
micro-batches are dealt out in rounds, one to each replica that still needs some, so that
equal counts give exactly Megatron's own assignment (replica r: micro-batches r, r + dp, ...).
"""

from __future__ import annotations

from collections.abc import Sequence


def assign_micro_batches(micro_batches: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Indices (within the global batch) of the micro-batches of each replica.

    Args:
        micro_batches: how many micro-batches each replica gets.
    """
    assigned: list[list[int]] = [[] for _ in micro_batches]
    following = 0
    for round_ in range(max(micro_batches, default=0)):
        for replica, count in enumerate(micro_batches):
            if round_ < count:
                assigned[replica].append(following)
                following += 1
    return tuple(tuple(indices) for indices in assigned)
