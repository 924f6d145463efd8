"""Configuration -> plan request: defaults of sizes, vocabulary, the stock layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_uneven_tp.config.compose import compose
from nemo_uneven_tp.config.request import plan_of, plan_request
from nemo_uneven_tp.config.validate import Config, checked
from nemo_uneven_tp.config.vocabulary import BYTE_VOCAB_SIZE, tokenizer_vocab_size
from nemo_uneven_tp.errors import UserError


def config_of(*overrides: str) -> Config:
    composed = compose("uneven-tp plan", overrides)
    assert composed is not None
    return checked(composed)


def test_the_demo_loses_one_rank_of_four() -> None:
    plan = plan_of(config_of("uneven_tp.failed_ranks=[3]"))
    assert plan.degrees == (2, 1)
    assert plan.nominal_world_size == 4
    assert sum(plan.micro_batches) == plan.num_micro_batches
    assert plan.micro_batches[0] > plan.micro_batches[1] > 0


def test_sizes_that_are_left_out_follow_megatron() -> None:
    request = plan_request(
        config_of(
            "model.num_query_groups=null", "model.kv_channels=null", "model.ffn_hidden_size=null"
        )
    )
    assert request.model.num_query_groups == 8
    assert request.model.kv_channels == 16
    assert request.model.ffn_hidden_size == 512


def test_heads_that_do_not_divide_need_kv_channels() -> None:
    with pytest.raises(UserError, match="model.kv_channels"):
        plan_request(config_of("model.hidden_size=130", "model.kv_channels=null"))


def test_the_vocabulary_is_the_tokenizers_and_padded() -> None:
    request = plan_request(config_of())
    assert request.model.vocab_size == BYTE_VOCAB_SIZE
    assert request.model.should_pad_vocab


def test_a_preset_vocabulary_is_taken_as_it_is() -> None:
    request = plan_request(config_of("model.vocab_size=777", "data.tokenizer=not-there"))
    assert request.model.vocab_size == 777
    assert not request.model.should_pad_vocab


def test_world_size_is_nominal() -> None:
    request = plan_request(config_of("trainer.devices=8", "trainer.num_nodes=2"))
    assert request.world_size == 16


def test_the_stock_path_needs_a_layout_stock_megatron_can_build() -> None:
    overrides = ("model.num_query_groups=2", "strategy.tensor_model_parallel_size=4")
    with pytest.raises(UserError, match="query group"):
        plan_of(config_of(*overrides, "uneven_tp=off"))
    odd = ("model.num_query_groups=4", "model.ffn_hidden_size=341")
    assert plan_of(config_of(*odd)).degrees == (2, 2)
    with pytest.raises(UserError, match="stock Megatron"):
        plan_of(config_of(*odd, "uneven_tp=off"))


def test_size_of_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    tokenizer = {
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}},
        "added_tokens": [{"content": "</s>"}, {"content": "b"}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert tokenizer_vocab_size(str(tmp_path)) == 3


@pytest.mark.parametrize("content", ["{", '{"model": {"vocab": [1]}}'])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="can't be loaded"):
        tokenizer_vocab_size(str(tmp_path))


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        tokenizer_vocab_size(str(tmp_path / "no.model"))
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match="is not a .model file"):
        tokenizer_vocab_size(str(tmp_path / "a.txt"))
