"""Attention by query group or by query head: who computes what, and which cut pays."""

from __future__ import annotations

import pytest

from nemo_uneven_tp.costs import (
    attention_flops,
    mlp_flops,
    model_flops_per_token,
    output_flops,
)
from nemo_uneven_tp.head_split import compare_cuts, groups_of_heads
from nemo_uneven_tp.shares import block_boundaries, even_boundaries
from tests.shapes import LLAMA3_70B

VOCAB = 128_256


def busiest_over_ideal(attention: tuple[float, ...]) -> float:
    """FLOPs of the busiest rank of a whole Llama-3 70B over an equal part of all."""
    degree = len(attention)
    columns = even_boundaries(LLAMA3_70B.ffn_hidden_size, degree)
    rows = block_boundaries(VOCAB, degree)[1]
    ranks = [
        LLAMA3_70B.num_layers * (own + mlp_flops(LLAMA3_70B, columns[i + 1] - columns[i]))
        + output_flops(LLAMA3_70B, rows)
        for i, own in enumerate(attention)
    ]
    return max(ranks) / (model_flops_per_token(LLAMA3_70B, VOCAB) / degree)


def test_llama3_70b_over_seven_of_eight_ranks() -> None:
    cut = compare_cuts(LLAMA3_70B, 7)
    assert cut.by_head_pays
    assert busiest_over_ideal(cut.flops_by_head) == pytest.approx(1.034, abs=1e-3)
    assert busiest_over_ideal(cut.flops_by_group) == pytest.approx(1.175, abs=1e-3)


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_both_cuts_are_one_where_groups_divide(degree: int) -> None:
    cut = compare_cuts(LLAMA3_70B, degree)
    assert cut.flops_by_head == cut.flops_by_group
    assert not cut.by_head_pays


def test_more_ranks_than_groups() -> None:
    cut = compare_cuts(LLAMA3_70B, 16)
    assert cut.flops_by_head == (attention_flops(LLAMA3_70B, 4, 1),) * 16
    assert cut.flops_by_group[8:] == (0,) * 8
    with pytest.raises(ValueError, match="65 is not from 1 to the 64"):
        compare_cuts(LLAMA3_70B, 65)


@pytest.mark.parametrize("degree", range(1, 65))
def test_every_group_is_where_its_heads_are(degree: int) -> None:
    heads = even_boundaries(64, degree)
    for first, stop in zip(heads, heads[1:], strict=False):
        assert set(groups_of_heads(LLAMA3_70B, first, stop)) == {h // 8 for h in range(first, stop)}
    assert list(groups_of_heads(LLAMA3_70B, 8, 8)) == []
