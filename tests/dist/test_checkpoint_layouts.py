"""Checkpoints between layouts: what is read is what was written, and training goes on alike."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_uneven_tp.model_shape import ModelShape
from tests.dist.checkpoints import Layout, Part, chunk_bytes, plain, run_part
from tests.dist.parity import Case, canonical, draw_case
from tests.distributed import RankPool

FIRST, LAST = 10, 20
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
LOSS_TOLERANCE = 1e-5
TIMEOUT_S = 60.0


def llama_like(**fixed: Any) -> ModelShape:
    """A shape that stock Megatron cuts at TP1, TP2 and TP4 with the same padded vocabulary."""
    shape = ModelShape(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=4,
        ffn_hidden_size=24,
        vocab_size=39,
        seq_length=8,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        make_vocab_size_divisible_by=2,
    )
    return replace(shape, **fixed)


def stock(degree: int, replicas: int, distributed: bool = False) -> Layout:
    """A stock layout."""
    return Layout((degree,) * replicas, stock=True, distributed=distributed)


def uneven(*degrees: int, distributed: bool = False) -> Layout:
    """An uneven layout."""
    return Layout(degrees, distributed=distributed)


def losses(layout: Layout, reports: list[dict[str, Any]]) -> list[float]:
    """Mean loss of each global batch."""
    leaders, rank = [], 0
    for degree in layout.degrees:
        leaders.append(rank)
        rank += degree
    curve = []
    for step in range(len(reports[0]["losses"])):
        parts = [reports[leader]["losses"][step] for leader in leaders]
        curve.append(sum(p[0] for p in parts) / sum(p[1] for p in parts))
    return curve


def assert_same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Bitwise the same tensors under the same keys."""
    assert one.keys() == other.keys()
    for key, tensor in one.items():
        assert tensor.dtype == other[key].dtype, key
        assert torch.equal(tensor, other[key]), key


def check(
    ranks: RankPool,
    folder: Path,
    case: Case,
    a: Layout,
    b: Layout,
    tolerance: float = LOSS_TOLERANCE,
    parallel: bool = True,
    asynchronous: bool = False,
) -> None:
    """Train in ``a``, save, go on in ``b``: as if ``a`` had never stopped.

    ``parallel`` is Megatron's fully-parallel save, and load where ``b`` is stock.
    """
    paths = {name: str(folder / name) for name in ("first", "copy")}
    for path in paths.values():
        Path(path).mkdir()

    def run(layout: Layout, part: Part) -> list[dict[str, Any]]:
        return ranks.run(
            run_part, layout.world_size, case=case, layout=layout, part=part, timeout_s=TIMEOUT_S
        )

    saving = Part(0, LAST, None, None, paths["first"], FIRST, parallel, asynchronous)
    whole = run(a, saving)
    after = run(b, Part(FIRST, LAST, load=paths["first"], copy=paths["copy"], parallel=parallel))
    (first,) = ranks.run(plain, 1, folder=paths["first"])
    (copy,) = ranks.run(plain, 1, folder=paths["copy"])
    assert_same_tensors(first, copy)
    if not a.stock:
        plan = replace(case, degrees=a.degrees).plan()
        for replica in range(plan.replicas):
            saved = canonical(plan, replica, [r["saved"] for r in whole])
            assert_same_tensors({name: on_disk(first, name) for name in saved}, saved)
    expected = losses(a, whole)[FIRST:]
    assert losses(b, after) == pytest.approx(expected, rel=tolerance)


def on_disk(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The parameter ``name`` among a checkpoint's tensors, where layers are stacked."""
    for local, fused in FUSED.items():  # Megatron's keys are those of Transformer Engine
        name = name.replace(local, fused)
    words = name.split(".")
    if "layers" not in words:
        return tensors[name]
    at = words.index("layers") + 1
    return tensors[".".join(words[:at] + words[at + 1 :])][int(words[at])]


STOCK_PAIRS: list[tuple[Layout, Layout, dict[str, Any]]] = [
    (stock(2, 2), uneven(2, 1), {}),
    (uneven(4, 3), stock(2, 2), {"share_embeddings_and_output_weights": True}),
    (stock(4, 1), uneven(3, 2), {"gated_linear_unit": False, "add_bias_linear": True}),
    (uneven(3, 1, 2), stock(1, 1), {"position_embedding_type": "learned_absolute"}),
    (stock(2, 2, True), uneven(2, 1, distributed=True), {}),
    (
        uneven(4, 3, distributed=True),
        stock(4, 2, True),
        {"share_embeddings_and_output_weights": True, "add_qkv_bias": True},
    ),
    (stock(1, 3, True), uneven(3, 2, distributed=True), {"qk_layernorm": True}),
    (uneven(2, 1, 3, distributed=True), stock(1, 2, True), {"add_bias_linear": True}),
    # 21 tokens: 25 rows at TP1, 30 at TP2, 40 at TP4, and 42 in the cell of degree 3.
    (
        stock(4, 2, True),
        uneven(3, 1, distributed=True),
        {"vocab_size": 21, "make_vocab_size_divisible_by": 5},
    ),
    (
        uneven(3, 1),
        stock(2, 1),
        {"vocab_size": 21, "make_vocab_size_divisible_by": 5, "num_query_groups": 8},
    ),
]


@pytest.mark.parametrize("pair", range(len(STOCK_PAIRS)))
def test_stock_and_uneven_read_each_other(ranks: RankPool, tmp_path: Path, pair: int) -> None:
    a, b, shape = STOCK_PAIRS[pair]
    case = Case(
        seed=pair,
        shape=llama_like(**shape),
        degrees=a.degrees,
        global_batch_size=6,
        micro_batch_size=1,
        lr=1e-3,
        # Several buckets with padding between them, which stock Megatron writes wrongly.
        overlap=a.distributed,
        bucket_size=1000 if a.distributed else None,
        reference=next(max(layout.degrees) for layout in (a, b) if layout.stock),
    )
    check(ranks, tmp_path, case, a, b, parallel=pair % 3 > 0, asynchronous=pair % 2 > 0)


@pytest.mark.parametrize(
    ("precision", "distributed"), [("bf16", False), ("bf16", True), ("fp16", True)]
)
def test_mixed_precision(
    ranks: RankPool, tmp_path: Path, precision: str, distributed: bool
) -> None:
    case = Case(
        seed=3,
        shape=llama_like(),
        degrees=(2, 1),
        global_batch_size=3,
        micro_batch_size=1,
        lr=1e-3,
        precision=precision,
        initial_loss_scale=2.0**8,
    )
    a, b = uneven(2, 1, distributed=distributed), stock(1, 3, distributed)
    # Losses agree as far as 16-bit activations let them; the state agrees bitwise.
    check(ranks, tmp_path, case, a, b, tolerance=1e-2)


@pytest.mark.parametrize("seed", range(8))
def test_random_uneven_layouts_read_each_other(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    case = draw_case(500 + seed, max_world=6, lr=1e-3)
    most = min(max(case.degrees) + 1, case.shape.num_query_groups, case.shape.ffn_hidden_size)
    other = tuple(rng.randint(1, most) for _ in range(rng.randint(1, 3)))
    case = replace(case, global_batch_size=case.micro_batch_size * 6)
    distributed = seed % 2 == 1
    a = Layout(case.degrees, distributed=distributed)
    b = Layout(other, distributed=distributed)
    parallel, asynchronous = rng.random() < 0.5, rng.random() < 0.5
    check(ranks, tmp_path, case, a, b, parallel=parallel, asynchronous=asynchronous)


def test_vocabulary_padding_may_differ(ranks: RankPool, tmp_path: Path) -> None:
    """Rows of the tokenizer are read; padding rows that were not stored are zero."""
    small = llama_like(vocab_size=21, make_vocab_size_divisible_by=5)
    case = Case(4, small, (2, 1), global_batch_size=3, micro_batch_size=1, lr=1e-3, reference=1)
    wider = replace(case, reference=2)  # 25 rows, then 30
    folders = {name: tmp_path / name for name in ("first", "wide", "back")}
    for folder in folders.values():
        folder.mkdir()
    first, wide, back = (str(folder) for folder in folders.values())
    for layout in (uneven(2, 1), uneven(2, 1, distributed=True)):
        for now, part in (
            (case, Part(0, 2, save=first, save_at=1)),
            (wider, Part(1, 2, load=first, copy=wide)),
            (case, Part(1, 2, load=wide, copy=back)),
        ):
            ranks.run(run_part, 3, case=now, layout=layout, part=part, timeout_s=TIMEOUT_S)
        read = {name: ranks.run(plain, 1, folder=str(f))[0] for name, f in folders.items()}
        assert_same_tensors(read["first"], read["back"])
        for key, tensor in read["wide"].items():
            if "word_embeddings" in key or "output_layer" in key:
                assert tensor.shape[0] == 30
                assert torch.equal(tensor[:25], read["first"][key])
                assert not tensor[25:].any()


def test_a_rank_may_own_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """Five vocabulary rows over four ranks leave the last one without any."""
    case = Case(
        seed=5,
        shape=llama_like(vocab_size=5, make_vocab_size_divisible_by=1),
        degrees=(4, 1),
        global_batch_size=3,
        micro_batch_size=1,
        lr=1e-3,
    )
    check(ranks, tmp_path, case, uneven(4, 1), uneven(1, 3))
    other = tmp_path / "distributed"
    other.mkdir()
    layouts = uneven(4, 1, distributed=True), uneven(3, 1, distributed=True)
    check(ranks, other, case, *layouts)


@pytest.mark.parametrize("distributed", [False, True])
def test_each_element_is_written_once_and_by_all(
    ranks: RankPool, tmp_path: Path, distributed: bool
) -> None:
    """Without Megatron's own distribution of the work: bytes per rank, and their sum."""
    shape = llama_like(hidden_size=64, kv_channels=16, ffn_hidden_size=96)
    case = Case(6, shape, (3, 2), global_batch_size=3, micro_batch_size=1)
    part = Part(0, 2, save=str(tmp_path), save_at=1, parallel=False)
    ranks.run(
        run_part,
        5,
        case=case,
        layout=uneven(3, 2, distributed=distributed),
        part=part,
        timeout_s=TIMEOUT_S,
    )
    (stored,) = ranks.run(chunk_bytes, 1, folder=str(tmp_path))
    (read,) = ranks.run(plain, 1, folder=str(tmp_path))
    tensors = sum(t.numel() * t.element_size() for t in read.values())
    assert sum(stored.values()) == tensors
    assert len(stored) == 5
    assert max(stored.values()) < 2 * tensors / 5


@pytest.mark.parametrize("distributed", [False, True])
def test_a_rank_reads_little_more_than_it_needs(
    ranks: RankPool, tmp_path: Path, distributed: bool
) -> None:
    """Bytes read from the checkpoint against bytes of the rank's own state."""
    shape = llama_like(hidden_size=64, kv_channels=16, ffn_hidden_size=96)
    case = Case(6, shape, (3, 2), global_batch_size=3, micro_batch_size=1)
    written, read = uneven(3, 2, distributed=distributed), uneven(2, 3, distributed=distributed)
    first = Part(0, 2, save=str(tmp_path), save_at=1)
    ranks.run(run_part, 5, case=case, layout=written, part=first, timeout_s=TIMEOUT_S)
    again = Part(1, 2, load=str(tmp_path))
    reports = ranks.run(run_part, 5, case=case, layout=read, part=again, timeout_s=TIMEOUT_S)
    for report in reports:
        # Whole chunks are read, of which a neighbour may own a part.
        assert report["needed_bytes"] <= report["read_bytes"] < 1.7 * report["needed_bytes"]
