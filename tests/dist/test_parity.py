"""Uneven runs against stock Megatron on one process: gradients, losses, replicas."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from nemo_uneven_tp.layout_options import LayoutOptions
from tests.dist.parity import (
    Case,
    canonical,
    draw_case,
    draw_pipeline_case,
    fingerprint,
    loss_curve,
    run_stock,
    run_uneven,
)
from tests.distributed import RankPool

# fp32 sums in another order; the prototypes saw 7e-7 at worst.
GRADIENT_TOLERANCE = 2e-6
LOSS_TOLERANCE = 1e-5
TIMEOUT_S = 25.0


Tensors = dict[str, torch.Tensor]


def assert_close(actual: Tensors, expected: Tensors, tolerance: float, what: str) -> None:
    """Relative distance (2-norm) of every tensor within ``tolerance``.

    A gradient that is zero but for rounding (a bias on all keys shifts every score alike) has
    no relative error to speak of: norms below 1e-2 of the typical element's count as that.
    """
    assert actual.keys() == expected.keys()
    elements = sum(t.numel() for t in expected.values())
    typical = (sum(float(t.double().norm()) ** 2 for t in expected.values()) / elements) ** 0.5
    for name, reference in expected.items():
        distance = float((actual[name].double() - reference.double()).norm())
        floor = 1e-2 * typical * reference.numel() ** 0.5
        error = distance / max(float(reference.double().norm()), floor)
        assert error <= tolerance, f"{what} of {name} is off by {error:.1e}"


def check(ranks: RankPool, case: Case) -> None:
    """Compare the uneven run of ``case`` with the stock one."""
    plan = case.plan()
    (stock,) = ranks.run(run_stock, 1, case=case, timeout_s=TIMEOUT_S)
    uneven = ranks.run(run_uneven, plan.world_size, case=case, timeout_s=TIMEOUT_S)
    for replica in range(plan.replicas):
        initial = canonical(plan, replica, [r["initial"] for r in uneven])
        for name, weight in stock["initial"].items():
            assert torch.equal(initial[name], weight), f"initial {name} of replica {replica}"
        if "grads" in stock and "grads" in uneven[0]:
            grads = canonical(plan, replica, [r["grads"] for r in uneven])
            assert_close(grads, stock["grads"], GRADIENT_TOLERANCE, "gradient")
    finals = [canonical(plan, r, [x["final"] for x in uneven]) for r in range(plan.replicas)]
    assert len({fingerprint(final) for final in finals}) == 1, "replicas differ"
    assert len({tuple(r["grad_norms"]) for r in uneven}) == 1, "ranks saw different norms"
    expected = [total / tokens for total, tokens in stock["losses"]]
    assert loss_curve(plan, uneven) == pytest.approx(expected, rel=LOSS_TOLERANCE)
    assert uneven[0]["grad_norms"] == pytest.approx(stock["grad_norms"], rel=1e-4)


@pytest.mark.parametrize("seed", range(32))
def test_random_layouts_match_one_process(ranks: RankPool, seed: int) -> None:
    """Random shapes and layouts: gradients within 2e-6, losses within 1e-5, replicas bitwise."""
    steps = 10 if seed % 4 == 0 else 2
    check(ranks, replace(draw_case(seed), steps=steps))


@pytest.mark.parametrize("seed", range(100, 116))
def test_distributed_optimizer_matches_one_process(ranks: RankPool, seed: int) -> None:
    """ZeRO-1 over sync groups: losses within 1e-5 of stock without it, replicas bitwise."""
    case = draw_case(seed, distributed_optimizer=True)
    check(ranks, replace(case, steps=6, optimizer="sgd" if seed % 5 == 0 else "adam"))


@pytest.mark.parametrize("seed", range(300, 320))
def test_stages_match_one_process(ranks: RankPool, seed: int) -> None:
    """Stages with their own degrees: random layouts of 2 to 4 stages, tied embeddings or not."""
    stages = 2 + seed % 3
    case = draw_pipeline_case(seed, stages, distributed_optimizer=seed % 5 > 2)
    check(ranks, replace(case, steps=3))


@pytest.mark.parametrize("seed", range(400, 406))
def test_virtual_stages_match_one_process(ranks: RankPool, seed: int) -> None:
    """Two model chunks per stage, Megatron's interleaved schedule."""
    case = draw_pipeline_case(seed, 2, chunks=2, distributed_optimizer=seed % 2 == 1)
    check(ranks, replace(case, steps=3))


@pytest.mark.parametrize("seed", range(500, 508))
def test_padded_sequences_match_one_process(ranks: RankPool, seed: int) -> None:
    """Sequence parallelism over 11 positions, which no degree but 1 divides."""
    case = draw_case(seed) if seed % 2 else draw_pipeline_case(seed, 2 + seed % 4 // 2)
    shape = replace(case.shape, seq_length=11)
    case = replace(case, sequence_parallel=True, shape=shape, distributed_optimizer=seed % 3 == 0)
    check(ranks, replace(case, steps=3))


@pytest.mark.parametrize("seed", range(200, 210))
def test_speeds_of_ranks_match_one_process(ranks: RankPool, seed: int) -> None:
    """Shares in proportion to speeds, equal degrees too, with and without sharded optimizers."""
    rng = random.Random(seed)
    case = draw_case(seed, distributed_optimizer=rng.random() < 0.5)
    if rng.random() < 0.5:
        degree = rng.choice([2, 3])
        case = replace(case, degrees=(degree,) * rng.randint(1, 2))
    nominal = max(case.degrees)
    speeds = [rng.choice([1.0, 1.0, 0.7, 0.3]) for _ in range(nominal * len(case.degrees))]
    speeds[0] = 0.6
    case = replace(case, options=LayoutOptions(rank_speeds=speeds), steps=2)
    check(ranks, case)
