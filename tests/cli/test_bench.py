"""``uneven-tp bench``: stable names, both kinds of counts, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.conftest import Outcome

UnevenTP = Callable[..., Outcome]
TINY = (
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=4",
    "model.kv_channels=4",
    "model.ffn_hidden_size=24",
    "model.seq_length=8",
)
RANK_NAMES = {
    *("rank", "replica", "stage", "degree", "shard_bytes", "grad_sync_bytes"),
    *("param_gather_bytes", "optimizer_bytes", "staging_bytes", "flops_share_over_ideal"),
}
PEER_NAMES = {
    *("grad_sync_bytes_over_shard", "all_to_all_bytes", "side_buffer_bytes"),
    "step_time_ratio_to_segments",
}
NAMES = {
    *("ranks", "grad_sync_bytes_over_shard", "optimizer_bytes_over_bound", "sync_groups"),
    *("noop_step_time_ratio", "noop_pairs", "reshard_first"),
}


@pytest.mark.timeout(400)
def test_times_and_counts_of_real_processes(uneven_tp: UnevenTP) -> None:
    outcome = uneven_tp("bench", "--json", *TINY, "uneven_tp.failed_ranks=[3]")
    assert outcome.code == 0, outcome.err
    report = json.loads(outcome.out)
    assert set(report) >= NAMES
    assert all(set(rank) >= RANK_NAMES for rank in report["ranks"])
    assert set(report["reshard_first"]) >= PEER_NAMES
    assert report["counts"] == "measured"
    assert [rank["nominal_rank"] for rank in report["ranks"]] == [0, 1, 2]
    assert report["grad_sync_bytes_over_shard"] == pytest.approx(1.0, abs=0.01)
    assert report["noop_pairs"] >= 10
    assert 0.5 < report["noop_step_time_ratio"] < 2.0  # what it is exactly depends on the machine
    assert report["reshard_first"]["grad_sync_bytes_over_shard"] > 1.8
    assert report["reshard_first"]["step_time_ratio_to_segments"] > 0
    checkpoint = report["checkpoint"]
    assert 1 < checkpoint["file_bytes_over_state"] < 4  # of so small a model, much is headers
    assert checkpoint["rounds"] >= 5
    assert checkpoint["save_time_ratio_to_stock"] > 0
    assert checkpoint["load_time_ratio_to_stock"] > 0
    kinds = {call["kind"] for call in report["ranks"][0]["collectives"]}
    assert "all_reduce" in kinds


def test_a_large_job_is_counted_from_its_plan(uneven_tp: UnevenTP) -> None:
    large = ("--config-name", "gpt3_126m", "uneven_tp.failed_ranks=[2]")
    outcome = uneven_tp("bench", "--counts-only", *large)
    assert outcome.code == 0
    for text in ("computed from the plan", "1 of degree 3, 1 of degree 4", "reshard-first"):
        assert text in outcome.out
    report = json.loads(uneven_tp("bench", "--counts-only", "--json", *large).out)
    assert report["counts"] == "computed"
    assert set(report) >= NAMES
    assert report["noop_step_time_ratio"] is None
    assert report["reshard_first"]["step_time_ratio_to_segments"] is None


def test_times_of_a_large_job_are_refused(uneven_tp: UnevenTP) -> None:
    outcome = uneven_tp("bench", "--config-name", "gpt3_126m")
    assert outcome.code == 2
    assert "add --counts-only" in outcome.err
    assert outcome.err.count("\n") == 1


def test_bad_input_is_one_sentence(uneven_tp: UnevenTP) -> None:
    outcome = uneven_tp("bench", "--counts-only", "uneven_tp.failed_ranks=[9]")
    assert outcome.code == 2
    assert outcome.err.count("\n") == 1
