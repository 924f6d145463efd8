"""Checks of a composed configuration: unknown keys, types, values, features."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import DictConfig

from nemo_uneven_tp.config.compose import compose
from nemo_uneven_tp.config.keys import nearest, shown, unknown_key
from nemo_uneven_tp.config.schema import RecipeRunConfig, RunConfig
from nemo_uneven_tp.config.validate import checked, value_of
from nemo_uneven_tp.errors import UnsupportedError, UserError


def composed(*overrides: str) -> DictConfig:
    config = compose("uneven-tp plan", overrides)
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("model.num_layrs", "model.num_layers"),
        ("num_layers", "model.num_layers"),
        ("uneven_tp.failed_rank", "uneven_tp.failed_ranks"),
        ("optim.learning_rate", None),
        ("model.window_siz", "+model.window_size"),
        ("run_dri", "run_dir"),
        ("zzz", None),
    ],
)
def test_the_nearest_key(misspelt: str, meant: str | None) -> None:
    assert nearest(misspelt, RunConfig) == meant


def test_a_field_of_nemo_that_is_not_set_is_offered_with_a_plus() -> None:
    assert "+model.window_size" in unknown_key("model.window_size", RunConfig)


def test_keys_of_a_recipe_are_told_apart() -> None:
    assert "nemo_recipe" in unknown_key("recipe.name", RunConfig)
    assert "recipe.overrides" in unknown_key("strategy.x", RecipeRunConfig)


def test_values_are_shown_as_in_yaml() -> None:
    assert [shown(value) for value in (None, True, False, 1, "a")] == [
        "null",
        "true",
        "false",
        "1",
        "a",
    ]


def test_added_fields_of_nemo_and_megatron_are_kept() -> None:
    config = checked(
        composed(
            "+model.window_size=[128,0]",
            "+strategy.ckpt_async_save=false",
            "+strategy.align_param_gather=true",
            "+optim.sgd_momentum=0.5",
        )
    )
    assert config["model"]["window_size"] == [128, 0]
    assert config["strategy"]["ckpt_async_save"] is False
    assert config["strategy"]["align_param_gather"] is True
    assert config["optim"]["sgd_momentum"] == 0.5


def test_the_result_is_plain_typed_data() -> None:
    config = checked(composed("optim.lr=1", "trainer.precision=32", "data.paths=[a,b]"))
    assert isinstance(config["optim"]["lr"], float)
    assert config["trainer"]["precision"] == "32"
    assert type(config["data"]["paths"]) is list
    assert type(config["model"]) is dict
    assert config["trainer"]["val_check_interval"] == config["trainer"]["max_steps"]


def test_value_of() -> None:
    config: dict[str, Any] = {"a": {"b": 1}}
    assert value_of(config, "a.b") == 1
    assert value_of(config, "a.c") is None
    assert value_of(config, "a.b.c") is None


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("+model.num_layrs=3", "did you mean model.num_layers"),
        ("+foo=1", "foo is not a key"),
        ("+uneven_tp.failed_rank=[1]", "did you mean uneven_tp.failed_ranks"),
        ("+data.reset=1", "data.reset is not a key"),
        ("+model.activation_func=x", "model.activation"),
        ("+model.sequence_parallel=true", "strategy.sequence_parallel"),
        ("+model.init_method=x", "Python object"),
        ("trainer.devices=abc", "trainer.devices=abc must be an integer"),
        ("trainer.devices=1.5", "must be an integer"),
        ("trainer.devices=true", "trainer.devices=true must be an integer"),
        ("trainer.devices=0", "at least 1"),
        ("model.num_layers=null", "model.num_layers=null must be an integer"),
        ("model.hidden_dropout=1", "less than 1"),
        ("model.normalization=rmsnorm", "one of LayerNorm, RMSNorm"),
        ("trainer.precision=fp8", "one of 32, bf16-mixed, 16-mixed"),
        ("trainer.accelerator=tpu", "one of cpu, gpu, auto"),
        ("strategy.sequence_parallel=maybe", "must be true or false"),
        ("optim.lr=-1", "optim.lr=-1.0 must be at least 0"),
        ("uneven_tp.failed_ranks=3", "must be a list"),
        ("data.split=a", "data.split"),
        ("~model.num_layers", "model.num_layers has no value"),
        ("seed=${foo}", "can't be resolved"),
    ],
)
def test_refused(override: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        checked(composed(override))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "feature"),
    [
        ("+model.num_moe_experts=8", "mixture of experts"),
        ("+model.multi_latent_attention=true", "multi-latent attention"),
        ("+strategy.fsdp=megatron", "FSDP"),
        ("+strategy.use_megatron_fsdp=true", "FSDP"),
        ("strategy.virtual_pipeline_model_parallel_size=2", "virtual pipeline"),
        ("strategy.context_parallel_size=2", "context parallelism"),
        ("strategy.expert_model_parallel_size=2", "expert parallelism"),
    ],
)
def test_unsupported_features_are_named(override: str, feature: str) -> None:
    with pytest.raises(UnsupportedError, match=feature):
        checked(composed(override))


def test_failed_ranks_need_the_plugin() -> None:
    with pytest.raises(UserError, match="needs uneven_tp=on"):
        checked(composed("uneven_tp=off", "uneven_tp.failed_ranks=[1]"))


def test_overlapped_gathering_needs_the_distributed_optimizer() -> None:
    overrides = ("strategy.overlap_param_gather=true", "optim.use_distributed_optimizer=false")
    with pytest.raises(UserError, match="use_distributed_optimizer=true"):
        checked(composed(*overrides))
    checked(composed(overrides[0]))
