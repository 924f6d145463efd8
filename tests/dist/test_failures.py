"""What goes wrong in the middle of a step ends the run, with the culprit named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.runs import end_at_error, small_case
from tests.distributed import RankFailure, RankPool

DEGREES = (3, 1, 2)
TIMEOUT_S = 40.0


@pytest.mark.parametrize(
    ("name", "rank", "value", "said", "distributed", "overlap"),
    [
        ("linear_fc2.weight", 4, "nan", "linear_fc2.weight, ffn units 0 to 7 on rank 6", 0, 0),
        ("linear_fc2.weight", 3, "inf", "linear_fc2.weight, ffn units 0 to 7 on rank 3", 1, 1),
        ("final_layernorm.weight", 2, "nan", "layernorm.weight (replicated) on rank 2", 0, 1),
        ("final_layernorm.weight", 5, "inf", "layernorm.weight (replicated) on rank 7", 1, 0),
    ],
)
def test_not_a_number_is_named_and_ends_all_ranks(
    ranks: RankPool,
    tmp_path: Path,
    name: str,
    rank: int,
    value: str,
    said: str,
    distributed: int,
    overlap: int,
) -> None:
    case = small_case(
        DEGREES,
        num_query_groups=3,
        num_attention_heads=3,
        distributed_optimizer=bool(distributed),
        overlap=bool(overlap),
        bucket_size=300,
        steps=4,
    )
    spoil = {"name": name, "rank": rank, "step": 2, "value": float(value)}
    with pytest.raises(RankFailure):
        ranks.run(
            end_at_error,
            6,
            run="run_with_spoiled_gradient",
            folder=str(tmp_path),
            case=case,
            timeout_s=TIMEOUT_S,
            **spoil,
        )
    errors = read(tmp_path)
    assert sorted(errors) == list(range(6))  # all ended, the others because they lost a peer
    kind = {"nan": "NaN", "inf": "Inf"}[value]
    assert errors[rank].startswith(f"NonFiniteGradientError: {kind} in the gradient of ")
    assert said in errors[rank]


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_a_killed_rank_ends_the_others(ranks: RankPool, tmp_path: Path, distributed: bool) -> None:
    """Every survivor ends with an error of its own, within the timeout of collectives."""
    case = small_case(
        DEGREES,
        num_query_groups=3,
        num_attention_heads=3,
        distributed_optimizer=distributed,
        overlap=True,
        steps=4,
    )
    with pytest.raises(RankFailure, match="rank 3: the process died"):
        ranks.run(
            end_at_error,
            6,
            run="run_and_die",
            folder=str(tmp_path),
            case=case,
            rank=3,
            step=2,
            timeout_s=TIMEOUT_S,
        )
    assert sorted(read(tmp_path)) == [0, 1, 2, 4, 5]


def read(folder: Path) -> dict[int, str]:
    """The error each rank left."""
    return {int(path.name): path.read_text() for path in folder.iterdir()}
