"""Replicas that have come apart by one bit are found, named, and cheaply so."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from nemo_uneven_tp.replica_check import fingerprint
from tests.dist.runs import differences_after_flip, differences_after_shard_flip, small_case
from tests.distributed import RankPool

# Nominal ranks 0-2, 3-5, 6-8; living ones 0-2, 3, 6-7.
DEGREES = (3, 1, 2)


def case_of(**fixed: object) -> object:
    shape = {"num_query_groups": 3, "num_attention_heads": 6, "vocab_size": 25}
    return small_case(DEGREES, **shape, steps=1, **fixed)


@pytest.mark.parametrize(
    ("name", "rank", "what", "segment", "nominal"),
    [
        ("linear_qkv.weight", 2, "parameter", "query_group units 2 to 2", [2, 3, 7]),
        ("linear_proj.weight", 3, "parameter", "query_group units 2 to 2", [2, 3, 7]),
        ("linear_fc1.weight", 4, "parameter", "ffn units 8 to 11", [1, 3, 6]),
        ("linear_fc2.weight", 1, "parameter", "ffn units 12 to 15", [1, 3, 7]),
        ("output_layer.weight", 5, "parameter", "vocab units 20 to 27", [2, 3, 7]),
        ("final_layernorm.weight", 3, "parameter", "(replicated)", [0, 3, 6]),
        ("final_layernorm.weight", 4, "parameter", "(replicated)", [6, 7]),
        ("linear_fc2.weight", 3, "exp_avg_sq", "ffn units", [2, 3, 7]),
        ("linear_fc1.weight", 0, "main", "ffn units", [0, 3, 6]),
    ],
)
@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_a_flipped_bit_is_named(
    ranks: RankPool,
    name: str,
    rank: int,
    what: str,
    segment: str,
    nominal: list[int],
    distributed: bool,
) -> None:
    if distributed and what != "parameter":
        pytest.skip("every element of the optimizer's state is on one rank only")
    case = case_of(
        distributed_optimizer=distributed, precision="bf16" if what == "main" else "fp32"
    )
    reports = ranks.run(differences_after_flip, 6, case=case, name=name, rank=rank, what=what)
    for before, after, _ in reports:
        assert before == []
        assert after == reports[0][1], "ranks tell different stories"
        if len(after) != 1:  # the leader of a cell differs from its cell and from its peers
            assert segment == "(replicated)"
    found = [text for text in reports[0][1] if str(nominal)[1:-1] in text.replace(" and ", ", ")]
    assert found, reports[0][1]
    assert name in found[0]
    assert segment in found[0]
    assert {"parameter": "parameter", "main": "fp32 copy"}.get(what, what) in found[0]


def test_comparison_is_cheap(ranks: RankPool) -> None:
    """One small collective per group the rank is in, one to agree: 16 bytes per tensor piece."""
    case = case_of()
    reports = ranks.run(
        differences_after_flip, 6, case=case, name="linear_fc1.weight", rank=0, what="parameter"
    )
    plan = case.plan()  # type: ignore[attr-defined]
    for rank, (_, _, calls) in enumerate(reports):
        cell, _ = plan.location(rank)
        mine = [group.ranks for group in plan.sync_groups if rank in group.ranks]
        expected = Counter(mine) + Counter([cell.ranks] * (cell.degree > 1))
        expected += Counter([tuple(range(plan.world_size))])
        assert Counter(group for _, group, _ in calls) <= expected
        assert {kind for kind, _, _ in calls} == {"all_reduce"}
        # 9 tensors, each with two Adam moments; in a cell of 1 each in up to 4 segments.
        assert sum(nbytes for _, _, nbytes in calls) <= 16 * 9 * 3 * 5


def test_a_spoilt_optimizer_shard_does_not_part_replicas(ranks: RankPool) -> None:
    """With the distributed optimizer all replicas get each element from the same shard."""
    case = case_of(distributed_optimizer=True)
    assert ranks.run(differences_after_shard_flip, 6, case=case, rank=1) == [[]] * 6


def test_fingerprint_sees_every_bit_and_the_order() -> None:
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert int(fingerprint(values)) == int(fingerprint(values.clone()))
    assert int(fingerprint(values)) != int(fingerprint(values.flip(0)))
    for element in range(values.numel()):
        for bit in range(32):
            other = values.clone()
            other.view(torch.int32).view(-1)[element] ^= 1 << bit if bit < 31 else -(1 << 31)
            assert int(fingerprint(other)) != int(fingerprint(values))
