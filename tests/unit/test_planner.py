"""Plans: who goes on, who holds what, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_uneven_tp.errors import UnsupportedError, UserError
from nemo_uneven_tp.model_shape import parameters
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.planner import PlanRequest, make_plan
from nemo_uneven_tp.shares import Axis
from tests.shapes import LLAMA3_8B


def request(**changes: Any) -> PlanRequest:
    """TP4 x DP2 of Llama 3 8B."""
    values: dict[str, Any] = {
        "model": LLAMA3_8B,
        "tensor_model_parallel_size": 4,
        "world_size": 8,
        "global_batch_size": 64,
        "micro_batch_size": 1,
    }
    return PlanRequest(**{**values, **changes})


def test_parameter_count_is_llama3_8bs() -> None:
    """8,030,261,248: the number Meta's model card rounds to 8.03B."""
    assert sum(p.elements() for p in parameters(LLAMA3_8B, 128256)) == 8_030_261_248


def test_one_lost_rank() -> None:
    plan = make_plan(request(failed_ranks=[5]))
    assert plan.degrees == (4, 3)
    assert plan.cells[1].nominal_ranks == (4, 6, 7)
    assert plan.cells[1].ranks == (4, 5, 6)
    assert plan.compact_rank(5) is None
    assert [plan.nominal_rank(r) for r in range(7)] == [0, 1, 2, 3, 4, 6, 7]
    assert plan.cells[1].shares[Axis.QUERY_GROUP] == (0, 3, 6, 8)
    assert sum(plan.micro_batches) == 64
    assert plan.micro_batches[0] > plan.micro_batches[1]
    assert not plan.is_uniform


def test_degrees_leave_out_the_last_ranks() -> None:
    by_degree = make_plan(request(degrees=[4, 3]))
    assert by_degree == make_plan(request(failed_ranks=[7]))


def test_nothing_failed_is_uniform() -> None:
    plan = make_plan(request())
    assert plan.is_uniform
    assert plan.micro_batches == (32, 32)
    assert [group.ranks for group in plan.sync_groups] == [(i, i + 4) for i in range(4)]


def staged(**changes: Any) -> PlanRequest:
    """TP2 x PP2 x DP2 of Llama 3 8B: nominal ranks 0-3 hold stage 0, 4-7 stage 1."""
    return request(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, **changes)


def test_only_the_stage_with_the_lost_rank_shrinks() -> None:
    plan = make_plan(staged(failed_ranks=[6]))
    assert plan.degree_table == [[2, 2], [2, 1]]
    assert (plan.stages, plan.replicas, plan.world_size) == (2, 2, 7)
    assert [cell.nominal_ranks for cell in plan.cells] == [(0, 1), (2, 3), (4, 5), (7,)]
    assert [cell.ranks for cell in plan.cells] == [(0, 1), (2, 3), (4, 5), (6,)]
    assert plan.cell(1, 1).nominal_ranks == (7,)
    assert [cell.stage for cell in plan.cells_of_replica(1)] == [0, 1]
    # Sync groups never mix stages: Llama 3's embedding and output are not tied.
    assert [group.ranks for group in plan.sync_groups] == [(0, 2), (1, 3), (4, 6), (5, 6)]
    assert plan.micro_batches[0] > plan.micro_batches[1]
    assert make_plan(staged(degrees=[2, [2, 1]])) == make_plan(staged(failed_ranks=[7]))


def test_tied_embeddings_meet_across_stages() -> None:
    tied = replace(LLAMA3_8B, share_embeddings_and_output_weights=True)
    plan = make_plan(staged(model=tied, failed_ranks=[6]))
    segments = plan.segments(Axis.VOCAB, 0)
    assert segments == plan.segments(Axis.VOCAB, 1)
    assert [segment.owners for segment in segments] == [(0, 2, 4, 6), (1, 3, 5, 6)]
    assert plan.owner(segments[1], plan.cell(1, 1)) == 6
    assert plan.owner(segments[1], plan.cell(1, 0)) == 3


def test_a_stage_without_ranks_drops_its_replica() -> None:
    with pytest.raises(UserError, match=r"stage 1 of replica 1 \(ranks 6 to 7\)"):
        make_plan(staged(failed_ranks=[6, 7]))
    plan = make_plan(staged(failed_ranks=[6, 7], allow_dropped_replicas=True))
    assert plan.failed_ranks == (2, 3, 6, 7)
    assert plan.degree_table == [[2, 2]]
    assert plan.is_uniform


def test_layers_of_virtual_stages() -> None:
    plan = make_plan(staged(virtual_pipeline_model_parallel_size=2))
    assert plan.layers(0).layers == (*range(8), *range(16, 24))
    assert plan.layers(1).layers == (*range(8, 16), *range(24, 32))
    assert all(count % 2 == 0 for count in plan.micro_batches)
    with pytest.raises(UserError, match="a multiple of 2 and at least 4"):
        make_plan(staged(virtual_pipeline_model_parallel_size=2, global_batch_size=5))
    with pytest.raises(UserError, match="every stage needs equally many layers"):
        make_plan(staged(virtual_pipeline_model_parallel_size=3))


def test_stages_hold_all_parameters_together() -> None:
    plan = make_plan(staged())
    whole = {p.name for p in parameters(LLAMA3_8B, plan.vocab_size)}
    parts = [
        p.name
        for stage in range(2)
        for p in parameters(LLAMA3_8B, plan.vocab_size, plan.layers(stage))
    ]
    assert len(parts) == len(whole)
    assert set(parts) == whole


def test_a_dropped_replica() -> None:
    plan = make_plan(request(failed_ranks=[0, 1, 2, 3], allow_dropped_replicas=True))
    assert plan.dropped_replicas == (0,)
    assert plan.micro_batches == (64,)
    assert plan.cells[0].nominal_ranks == (4, 5, 6, 7)


def test_reference_degree() -> None:
    odd = replace(LLAMA3_8B, num_query_groups=7, num_attention_heads=28, vocab_size=100)
    assert make_plan(request()).reference_tensor_parallel_size == 4
    assert make_plan(request(model=odd)).reference_tensor_parallel_size == 1
    padded = replace(LLAMA3_8B, vocab_size=100)
    assert make_plan(request(model=padded)).vocab_size == 512
    assert make_plan(request(model=padded, reference_tensor_parallel_size=1)).vocab_size == 128


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"failed_ranks": [8]}, "ranks of this job are 0 to 7"),
        ({"failed_ranks": [-1]}, "-1 is not a nominal rank"),
        ({"failed_ranks": [True]}, "True is not a nominal rank"),
        ({"failed_ranks": [3, 3]}, "rank 3 more than once"),
        ({"failed_ranks": [4, 5, 6, 7]}, "allow_dropped_replicas=true"),
        ({"failed_ranks": list(range(8)), "allow_dropped_replicas": True}, "no rank"),
        ({"failed_ranks": [1], "degrees": [4, 3]}, "both set"),
        ({"degrees": [4]}, "1 degrees for 2 replicas"),
        ({"degrees": [4, 0]}, "0 is not an integer from 1 to"),
        ({"degrees": [4, 5]}, "5 is not an integer from 1 to"),
        ({"degrees": [4, 2.5]}, "2.5 is not an integer"),
        ({"degrees": [[4, 4], [4, 3]]}, "2 degrees for 1 pipeline stages"),
        ({"world_size": 6}, "is not a multiple of"),
        ({"pipeline_model_parallel_size": 4}, "size=4 x strategy.pipeline"),
        ({"pipeline_model_parallel_size": 0}, "at least 1"),
        ({"virtual_pipeline_model_parallel_size": 2}, "set it to null"),
        ({"tensor_model_parallel_size": 0}, "at least 1"),
        ({"micro_batch_size": 3}, "not a multiple of data.micro_batch_size=3"),
        ({"global_batch_size": 1}, "too few for 2 replicas"),
        ({"global_batch_size": 0}, "data.global_batch_size=0"),
        ({"model": replace(LLAMA3_8B, num_query_groups=5)}, "multiple of"),
        ({"model": replace(LLAMA3_8B, num_query_groups=2)}, "at least one query group"),
        ({"model": replace(LLAMA3_8B, ffn_hidden_size=3)}, "ffn_hidden_size=3"),
        ({"model": replace(LLAMA3_8B, hidden_size=0)}, "model.hidden_size=0"),
        ({"reference_tensor_parallel_size": 3}, "1 always works"),
        ({"reference_tensor_parallel_size": 0}, "at least 1"),
    ],
)
def test_bad_requests_are_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        make_plan(request(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"context_parallel_size": 2}])
def test_what_is_not_supported_yet_says_so(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="not supported with uneven_tp yet"):
        make_plan(request(**changes))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans of random shapes, degrees and batches."""
    stages = draw(st.integers(1, 3))
    row = st.lists(st.integers(1, 6), min_size=stages, max_size=stages)
    table = draw(st.lists(row, min_size=1, max_size=5))
    degrees = [degree for cells in table for degree in cells]
    groups = draw(st.integers(max(degrees), 12))
    model = replace(
        LLAMA3_8B,
        num_layers=stages,
        share_embeddings_and_output_weights=draw(st.booleans()),
        hidden_size=draw(st.integers(1, 40)),
        num_query_groups=groups,
        num_attention_heads=groups * draw(st.integers(1, 3)),
        ffn_hidden_size=draw(st.integers(max(degrees), 60)),
        vocab_size=draw(st.integers(1, 200)),
        make_vocab_size_divisible_by=draw(st.integers(1, 16)),
    )
    micro = draw(st.integers(1, 3))
    return make_plan(
        PlanRequest(
            model=model,
            tensor_model_parallel_size=max(degrees),
            world_size=max(degrees) * len(degrees),
            global_batch_size=micro * draw(st.integers(len(table), 30)),
            micro_batch_size=micro,
            degrees=table,
            pipeline_model_parallel_size=stages,
        )
    )


@settings(deadline=None)  # other work on the machine is no failure
@given(plans())
def test_plans_travel_as_json(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.digest == plan.digest


@settings(deadline=None)  # other work on the machine is no failure
@given(plans())
def test_sync_groups_hold_every_unit_once_per_replica(plan: Plan) -> None:
    for stage in range(plan.stages):
        for axis in Axis:
            covered = [unit for s in plan.segments(axis, stage) for unit in range(s.start, s.stop)]
            held = axis is not Axis.VOCAB or stage in (0, plan.stages - 1)
            assert covered == list(range(plan.units(axis)) if held else [])
    grouped = [segment for group in plan.sync_groups for segment in group.segments]
    every = {s for stage in range(plan.stages) for axis in Axis for s in plan.segments(axis, stage)}
    assert len(grouped) == len(every)
    assert set(grouped) == every
    for group in plan.sync_groups:
        cells = [plan.location(rank)[0] for rank in group.ranks]
        assert [cell.replica for cell in cells[: plan.replicas]] == list(range(plan.replicas))
        assert len({(cell.replica, cell.stage) for cell in cells}) == len(cells)
        if len(cells) > plan.replicas:
            assert {segment.axis for segment in group.segments} == {Axis.VOCAB}
            assert {cell.stage for cell in cells} == {0, plan.stages - 1}
            assert len(cells) == 2 * plan.replicas
        else:
            assert len({cell.stage for cell in cells}) == 1
        for segment in group.segments:
            for rank in group.ranks:
                cell, tp_rank = plan.location(rank)
                assert plan.owner(segment, cell) == rank
                share = cell.share(segment.axis, tp_rank)
                assert share.start <= segment.start
                assert segment.stop <= share.stop


@settings(deadline=None)  # other work on the machine is no failure
@given(plans())
def test_no_more_sync_groups_than_boundaries(plan: Plan) -> None:
    bound = 0
    for stage in range(plan.stages):
        cells = plan.cells_of_stage(stage)
        bound += min(cell.degree for cell in cells)
        bound += len({(a, point) for cell in cells for a in Axis for point in cell.shares[a][1:]})
    assert len(plan.sync_groups) <= bound


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format": 1}', '{"format": 2}', '{"format": 99}', "nonsense"]
)
def test_damaged_plans_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"plan\.json"):
        Plan.from_json(text)
