"""Composition: options and overrides, job ids, and agreement of conf/ with the schema."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_uneven_tp.config.compose import (
    compose,
    config_names,
    name_run_after_job,
    split_arguments,
)
from nemo_uneven_tp.config.keys import groups
from nemo_uneven_tp.config.schema import RunConfig
from nemo_uneven_tp.config.validate import checked
from nemo_uneven_tp.errors import UserError

CONF = Path(__file__).parents[2] / "conf"


def test_options_and_overrides_may_be_mixed() -> None:
    line = split_arguments(["seed=2", "--config-name", "mine", "--info", "defaults", "~model"])
    assert line.options == ("--config-name", "mine", "--info", "defaults")
    assert line.overrides == ("seed=2", "~model")
    assert line.config_name == "mine"


def test_option_values_may_be_joined() -> None:
    assert split_arguments(["--config-name=mine", "seed=2"]).config_name == "mine"


def test_the_last_option_needs_its_value() -> None:
    with pytest.raises(UserError, match="--config-dir needs a value"):
        split_arguments(["--config-dir"])


@pytest.mark.parametrize("name", config_names())
def test_every_recipe_composes_and_is_valid(name: str) -> None:
    arguments = ["--config-name", name]
    if name == "nemo_recipe":
        arguments.append("recipe.name=llama3_8b")
    composed = compose("uneven-tp plan", arguments)
    assert composed is not None
    config = checked(composed)
    assert config["uneven_tp"]["enabled"] is True
    assert config["name"] in (name, "llama3_8b")


@pytest.mark.parametrize("group", sorted(groups(RunConfig)))
def test_each_choice_of_a_group_has_exactly_the_keys_of_the_schema(group: str) -> None:
    choices = sorted((CONF / group).glob("*.yaml"))
    assert choices
    expected = {field.name for field in fields(groups(RunConfig)[group])}
    for choice in choices:
        values = OmegaConf.load(choice)
        assert OmegaConf.is_dict(values)
        assert {str(key) for key in values} == expected, choice


def test_hydra_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert compose("uneven-tp plan", ["seed=2"]) is not None
    assert list(tmp_path.iterdir()) == []


def test_own_configuration_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        'defaults: [gpt_tiny_cpu, {override uneven_tp: "off"}, _self_]\nname: mine\nseed: 7\n'
    )
    arguments = ["--config-dir", str(tmp_path), "--config-name", "mine", "optim.lr=1e-4"]
    composed = compose("uneven-tp plan", arguments)
    assert composed is not None
    config = checked(composed)
    assert (config["name"], config["seed"], config["data"]["seed"]) == ("mine", 7, 7)
    assert config["uneven_tp"]["enabled"] is False
    assert config["optim"]["lr"] == 1e-4


def test_a_job_id_takes_the_place_of_the_time() -> None:
    config = OmegaConf.create({"name": "a", "run_dir": "runs/${name}/${now:%H}"})
    name_run_after_job(config, "42")
    assert config.run_dir == "runs/a/42"


def test_a_run_dir_without_time_stays() -> None:
    config = OmegaConf.create({"run_dir": "runs/mine"})
    name_run_after_job(config, None)
    assert config.run_dir == "runs/mine"


def test_a_launcher_without_job_id_needs_a_run_dir() -> None:
    config = OmegaConf.create({"run_dir": "runs/${now:%H}"})
    with pytest.raises(UserError, match="set run_dir"):
        name_run_after_job(config, None)
