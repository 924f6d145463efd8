"""What crosses between stages of different degree: everything, once, where it belongs."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from nemo_uneven_tp.stage_boundary import block_of, transfers

PAIRS = list(product(range(1, 9), range(1, 9)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(9, 10), (840, 3), (5, 1), (1, 2)])
def test_every_element_crosses_once(rows: int, width: int, sequence_parallel: bool) -> None:
    for senders, receivers in PAIRS:
        found = transfers(rows, width, senders, receivers, sequence_parallel)
        sent = Counter(element for t in found for element in range(t.start, t.stop))
        assert sent == Counter(range(rows * width))
        assert len({(t.sender, t.receiver) for t in found}) == len(found)
        assert len(found) < senders + receivers


@pytest.mark.parametrize(("rows", "width"), [(9, 10), (840, 3)])
def test_ranks_share_the_work(rows: int, width: int) -> None:
    """Without sequence parallelism no rank sends or receives more than an equal part."""
    for senders, receivers in PAIRS:
        found = transfers(rows, width, senders, receivers, False)
        sent, received = Counter[int](), Counter[int]()
        for t in found:
            sent[t.sender] += t.stop - t.start
            received[t.receiver] += t.stop - t.start
        assert max(sent.values()) == block_of(rows * width, senders)
        assert max(received.values()) == block_of(rows * width, receivers)


def test_sequence_parallel_rows_go_where_they_are_held() -> None:
    """9 rows, 2 ranks (5 + 4) to 4 (3 + 3 + 3 + 0): the last receiver holds padding only."""
    found = {(t.sender, t.receiver): (t.start, t.stop) for t in transfers(9, 1, 2, 4, True)}
    assert found == {(0, 0): (0, 3), (0, 1): (3, 5), (1, 1): (5, 6), (1, 2): (6, 9)}
