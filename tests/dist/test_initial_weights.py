"""Replicas start equal, and as the stock run at the nominal degree would for the same seed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_uneven_tp.initial_weights import stock_to_canonical
from nemo_uneven_tp.model_shape import cut_of
from tests.dist.parity import Case, canonical, fingerprint, run_stock, run_uneven
from tests.dist.runs import equal_from_perturbed, small_case
from tests.distributed import RankPool

SHAPES: dict[str, dict[str, Any]] = {
    "gated_untied_rope": {},
    "plain_tied_learned": {
        "gated_linear_unit": False,
        "share_embeddings_and_output_weights": True,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
    },
    "gated_tied_bias": {"share_embeddings_and_output_weights": True, "add_bias_linear": True},
}


def stock_weights(case: Case, reports: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The whole weights of a stock run at degree ``len(reports)``, gates before ups."""
    whole = {}
    for name in reports[0]["initial"]:
        parts = [report["initial"][name] for report in reports]
        cut = cut_of(name, case.shape)
        if cut is None:
            whole[name] = parts[0]
        else:
            whole[name] = stock_to_canonical(torch.cat(parts, cut.dim), cut, len(parts))
    return whole


@pytest.mark.parametrize("shape", SHAPES)
def test_default_reference_is_the_stock_run_at_the_nominal_degree(
    ranks: RankPool, shape: str
) -> None:
    case = small_case((2, 1), reference=None, steps=1, vocab_size=21, **SHAPES[shape])
    plan = case.plan()
    assert plan.reference_tensor_parallel_size == 2
    assert plan.vocab_size == 24
    stock = stock_weights(case, ranks.run(run_stock, 2, case=case, degree=2))
    uneven = ranks.run(run_uneven, 3, case=case)
    for replica in range(2):
        initial = canonical(plan, replica, [report["initial"] for report in uneven])
        assert initial.keys() == stock.keys()
        for name, weight in stock.items():
            assert torch.equal(initial[name], weight), f"{name} of replica {replica}"


@pytest.mark.parametrize("shape", SHAPES)
def test_broadcast_makes_unequal_replicas_equal(ranks: RankPool, shape: str) -> None:
    """As needed after initialization on GPUs, with a seed per rank."""
    degrees = (2, 3, 1)
    case = small_case(degrees, num_query_groups=3, num_attention_heads=3, **SHAPES[shape])
    plan = case.plan()
    weights = ranks.run(equal_from_perturbed, sum(degrees), case=case)
    whole = [canonical(plan, replica, weights) for replica in range(3)]
    assert len({fingerprint(weights) for weights in whole}) == 1
