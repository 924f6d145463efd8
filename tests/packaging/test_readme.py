"""What README.md tells people to type exists."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_uneven_tp.config.compose import config_names
from nemo_uneven_tp.config.keys import groups
from nemo_uneven_tp.config.schema import RunConfig
from tests.conftest import Outcome

UnevenTP = Callable[..., Outcome]
REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    match.group(1).partition("#")[0].split()
    for match in re.finditer(r"uneven-tp ((?:pretrain|plan) [^`\n]+)", README.replace("\\\n", ""))
]


def test_the_readme_has_commands() -> None:
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_commands_compose(uneven_tp: UnevenTP, command: list[str]) -> None:
    if "--cfg" not in command:
        command = [*command, "--cfg", "job"]
    outcome = uneven_tp(*command)
    assert outcome.code == 0, outcome.err


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = set(re.findall(r"make ([a-z]+)", README))
    assert {"pretrain", "test", "lint"} <= targets
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_groups_choices_and_configurations_are_listed() -> None:
    for group in groups(RunConfig):
        row = next(line for line in README.splitlines() if line.startswith(f"| `{group}` |"))
        for choice in (REPOSITORY / "conf" / group).glob("*.yaml"):
            assert f"`{choice.stem}`" in row
    assert all(f"`{name}`" in README for name in config_names())
