"""``uneven-tp plan``: what it prints, and that the bytes add up."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from nemo_uneven_tp.cli.plan import plan_text
from nemo_uneven_tp.cli.plan_report import Precision, parameter_count, rank_reports
from nemo_uneven_tp.cli.table import ranks, size, table
from nemo_uneven_tp.model_shape import ModelShape, parameters
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.planner import PlanRequest, make_plan
from nemo_uneven_tp.shares import Axis
from tests.conftest import Outcome

UnevenTP = Callable[..., Outcome]
FP32 = Precision.of("32", grad_reduce_in_fp32=False)


def odd_plan(replicas: int = 3, **changes: object) -> Plan:
    model = ModelShape(
        num_layers=2,
        hidden_size=20,
        num_attention_heads=10,
        num_query_groups=5,
        kv_channels=4,
        ffn_hidden_size=37,
        vocab_size=101,
        seq_length=16,
        gated_linear_unit=True,
        make_vocab_size_divisible_by=1,
    )
    arguments: dict[str, object] = {
        "model": model,
        "tensor_model_parallel_size": 4,
        "world_size": 4 * replicas,
        "global_batch_size": 4 * replicas,
        "micro_batch_size": 1,
        "failed_ranks": (1, 6, 7),
    }
    return make_plan(PlanRequest(**{**arguments, **changes}))  # type: ignore[arg-type]


def test_the_tables(uneven_tp: UnevenTP) -> None:
    outcome = uneven_tp("plan", "uneven_tp.failed_ranks=[3]")
    assert outcome.code == 0
    for text in ("3 of 4 ranks", "gone: 3", "TP2 x DP2", "Sync groups (2)", "4 bytes each"):
        assert text in outcome.out


def test_json_is_the_plan_and_more(uneven_tp: UnevenTP) -> None:
    data = json.loads(uneven_tp("plan", "--json", "uneven_tp.failed_ranks=[3]").out)
    plan = Plan.from_dict(data["plan"])
    assert plan.degrees == (2, 1)
    assert data["digest"] == plan.digest
    assert [rank["nominal_rank"] for rank in data["ranks"]] == [0, 1, 2]
    assert len(data["sync_groups"]) == 2


def test_each_replica_sends_every_gradient_once() -> None:
    plan = odd_plan()
    reports = rank_reports(plan, FP32)
    replicated = reports[0].sent_replicated_bytes
    for cell in plan.cells:
        own = sum(reports[rank].sent_sharded_bytes for rank in cell.ranks)
        assert own + replicated == 4 * parameter_count(plan)


def test_bytes_counted_parameter_by_parameter() -> None:
    plan = odd_plan()
    for report in rank_reports(plan, FP32):
        sent = held = 0
        for parameter in parameters(plan.model, plan.vocab_size):
            if parameter.cut is None:
                held += parameter.elements()
                continue
            start, stop = report.shares[parameter.cut.axis.value]
            sent += parameter.elements(stop - start)
            rows = -(-plan.vocab_size // report.degree)
            held += parameter.elements(rows if parameter.cut.axis is Axis.VOCAB else stop - start)
        assert report.sent_sharded_bytes == 4 * sent
        assert report.parameter_bytes == 4 * held


def test_one_replica_sends_nothing() -> None:
    for report in rank_reports(odd_plan(replicas=1, failed_ranks=(1,)), FP32):
        assert report.sent_sharded_bytes == report.sent_replicated_bytes == 0


@pytest.mark.parametrize(
    ("precision", "in_fp32", "parameter_bytes", "gradient_bytes"),
    [("32", False, 4, 4), ("bf16-mixed", True, 2, 4), ("bf16-mixed", False, 2, 2)],
)
def test_element_sizes(
    precision: str, in_fp32: bool, parameter_bytes: int, gradient_bytes: int
) -> None:
    assert Precision.of(precision, in_fp32) == Precision(
        parameter_bytes=parameter_bytes, gradient_bytes=gradient_bytes
    )


def test_like_ranks_share_a_row_in_large_jobs() -> None:
    text = plan_text("large", odd_plan(replicas=1000), FP32)
    assert len(text.splitlines()) < 60
    assert max(map(len, text.splitlines())) < 200


def test_dropped_replicas_are_named() -> None:
    plan = odd_plan(failed_ranks=(4, 5, 6, 7), allow_dropped_replicas=True)
    assert "dropped replicas (nominal): 1" in plan_text("x", plan, FP32)


def test_table_helpers() -> None:
    assert ranks([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert [size(n) for n in (0, 1023, 1536, 3 << 20)] == ["0 B", "1023 B", "1.50 KiB", "3.00 MiB"]
    assert table(("a", "bb"), [("x", 1), ("yy", 10)]) == "a   bb\n--  --\nx    1\nyy  10"
