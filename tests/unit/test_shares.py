"""Cutting axes: every unit has one owner per replica, whatever the degrees."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_uneven_tp.batch import assign_micro_batches
from nemo_uneven_tp.shares import (
    block_boundaries,
    cut_points,
    even_boundaries,
    largest_remainder,
    owner_index,
)

UNITS = st.integers(1, 500)
DEGREE = st.integers(1, 16)


@given(UNITS, DEGREE)
def test_even_shares_cover_all_units_and_differ_by_at_most_one(units: int, degree: int) -> None:
    boundaries = even_boundaries(units, degree)
    sizes = [b - a for a, b in zip(boundaries, boundaries[1:], strict=False)]
    assert (boundaries[0], boundaries[-1], len(sizes)) == (0, units, degree)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(UNITS, DEGREE)
def test_blocks_are_megatrons_vocabulary_ranges(units: int, degree: int) -> None:
    """Rank i starts at i times the block size, as Megatron's cross entropy assumes."""
    boundaries = block_boundaries(units, degree)
    block = boundaries[1]
    assert block * degree >= units
    assert boundaries[-1] == units
    assert all(b == min(i * block, units) for i, b in enumerate(boundaries))


@given(UNITS, st.lists(DEGREE, min_size=1, max_size=6), st.booleans())
def test_segments_have_one_owner_in_every_replica(
    units: int, degrees: list[int], blocks: bool
) -> None:
    cut = block_boundaries if blocks else even_boundaries
    every = [cut(units, degree) for degree in degrees]
    segments = cut_points(every)
    assert [a for a, _ in segments] == [0, *(b for _, b in segments[:-1])]
    assert segments[-1][1] == units
    for start, stop in segments:
        assert start < stop
        for boundaries in every:
            owner = owner_index(boundaries, start)
            assert boundaries[owner] <= start
            assert stop <= boundaries[owner + 1]


@given(st.integers(0, 200), st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_largest_remainder_splits_all_and_stays_near_the_quota(
    total: int, weights: list[float]
) -> None:
    parts = largest_remainder(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) < 1 + 1e-9


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(0, 50))
def test_largest_remainder_gives_everyone_the_minimum(weights: list[float], extra: int) -> None:
    parts = largest_remainder(len(weights) + extra, weights, minimum=1)
    assert sum(parts) == len(weights) + extra
    assert min(parts) >= 1


def test_too_little_for_the_minimum_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot give 3 parts"):
        largest_remainder(2, [1, 1, 1], minimum=1)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_every_micro_batch_is_dealt_out_once(counts: list[int]) -> None:
    assigned = assign_micro_batches(counts)
    assert [len(indices) for indices in assigned] == counts
    assert sorted(i for indices in assigned for i in indices) == list(range(sum(counts)))


@given(st.integers(1, 6), st.integers(1, 9))
def test_equal_counts_are_megatrons_assignment(replicas: int, count: int) -> None:
    assigned = assign_micro_batches([count] * replicas)
    assert assigned == tuple(tuple(range(r, replicas * count, replicas)) for r in range(replicas))
