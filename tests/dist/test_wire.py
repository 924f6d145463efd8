"""Counted on the wire: a rank sends exactly its own shard into gradient sync."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_uneven_tp.model_shape import parameters
from tests.dist.parity import Case, count_sync, draw_case
from tests.distributed import RankPool


def expected_elements(case: Case, rank: int) -> tuple[int, int]:
    """Elements of the rank's own shard, and of the replicated parameters."""
    plan = case.plan()
    cell, tp_rank = plan.location(rank)
    own = replicated = 0
    for parameter in parameters(plan.model, plan.vocab_size):
        if parameter.cut is None:
            replicated += parameter.elements()
        else:
            own += parameter.elements(len(cell.share(parameter.cut.axis, tp_rank)))
    return own, replicated


@pytest.mark.parametrize("seed", range(4))
def test_gradient_sync_sends_the_shard_and_nothing_else(ranks: RankPool, seed: int) -> None:
    """All-reduce: own shard over the sync groups, replicated parameters over the leaders."""
    case = replace(draw_case(seed), steps=1)
    plan = case.plan()
    for rank, calls in enumerate(ranks.run(count_sync, plan.world_size, case=case)):
        cell, tp_rank = plan.location(rank)
        own, replicated = expected_elements(case, rank)
        assert {kind for kind, group, _ in calls if group != cell.ranks} == {"all_reduce"}
        between = sum(nbytes for _, group, nbytes in calls if group != cell.ranks)
        assert between == 4 * (own + (replicated if tp_rank == 0 else 0))
        inside = [nbytes for kind, group, nbytes in calls if group == cell.ranks]
        if not case.shape.qk_layernorm:
            assert sum(inside) == (4 * replicated if cell.degree > 1 else 0)


@pytest.mark.parametrize("seed", range(4, 8))
def test_distributed_optimizer_sends_the_shard_and_nothing_else(ranks: RankPool, seed: int) -> None:
    """Reduce-scatter of gradients, all-gather of parameters, each within a padding unit."""
    case = replace(draw_case(seed), steps=1, distributed_optimizer=True)
    plan = case.plan()
    for rank, calls in enumerate(ranks.run(count_sync, plan.world_size, case=case)):
        cell, tp_rank = plan.location(rank)
        own, replicated = expected_elements(case, rank)
        wanted = 4 * (own + (replicated if tp_rank == 0 else 0))
        kinds = {"reduce_scatter", "all_gather"}
        assert {kind for kind, group, _ in calls if group != cell.ranks} == kinds
        for kind in kinds:
            sizes = [n for k, group, n in calls if group != cell.ranks and k == kind]
            padding = 4 * (plan.replicas - 1) * len(sizes)
            assert wanted <= sum(sizes) <= wanted + padding
