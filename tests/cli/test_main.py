"""Help, version, unknown commands, and what starting up costs."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable

import pytest

from nemo_uneven_tp import __version__
from nemo_uneven_tp.cli.help import COMMANDS
from nemo_uneven_tp.config.compose import DEFAULT_CONFIG_NAME, config_names
from tests.conftest import Outcome

UnevenTP = Callable[..., Outcome]


def in_new_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def processor_time_s() -> float:
    """Of all finished child processes: the wall clock also counts other people's work."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_a_command(uneven_tp: UnevenTP, command: str) -> None:
    outcome = uneven_tp(command, "--help")
    assert outcome.code == 0
    assert outcome.out.startswith(f"usage: uneven-tp {command} ")
    assert COMMANDS[command].text in outcome.out
    assert max(len(line) for line in outcome.out.splitlines()) <= 100


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help(uneven_tp: UnevenTP, arguments: list[str]) -> None:
    outcome = uneven_tp(*arguments)
    assert outcome.code == 0
    for word in ("pretrain", "plan", "demo", "uneven_tp.failed_ranks", *config_names()):
        assert word in outcome.out


def test_version(uneven_tp: UnevenTP) -> None:
    assert uneven_tp("--version").out == f"uneven-tp {__version__}\n"


def test_no_command_shows_the_help(uneven_tp: UnevenTP) -> None:
    outcome = uneven_tp()
    assert outcome.code == 2
    assert "usage" in outcome.out


def test_an_unknown_command(uneven_tp: UnevenTP) -> None:
    outcome = uneven_tp("train")
    assert outcome.code == 2
    assert "pretrain, plan, bench, checkpoint, goodput or demo" in outcome.err


def test_hydras_own_options_work(uneven_tp: UnevenTP) -> None:
    outcome = uneven_tp("pretrain", "model.num_layers=7", "--cfg", "job", "--package", "model")
    assert outcome.code == 0
    assert "num_layers: 7" in outcome.out
    assert DEFAULT_CONFIG_NAME in uneven_tp("plan", "--info", "defaults-tree").out
    assert uneven_tp("plan", "--hydra-help").code == 0


def test_help_is_quick_and_plan_imports_neither_torch_nor_nemo() -> None:
    code = (
        "import sys; from nemo_uneven_tp.cli.main import main; assert main(['plan']) == 0; "
        "heavy = {'torch', 'nemo', 'megatron', 'lightning', 'numpy', 'transformers'}; "
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    before = processor_time_s()
    done = in_new_process(code)
    assert done.returncode == 0, done.stderr
    assert processor_time_s() - before < 3
    before = processor_time_s()
    assert in_new_process("from nemo_uneven_tp.cli.main import main; main(['--help'])").stdout
    assert processor_time_s() - before < 1


def test_public_names_load_lazily() -> None:
    code = (
        "import sys, nemo_uneven_tp as u; assert 'nemo_uneven_tp.planner' not in sys.modules; "
        "u.Plan, u.make_plan, u.PlanRequest; assert 'torch' not in sys.modules; "
        "assert not hasattr(u, 'nothing')"
    )
    done = in_new_process(code)
    assert done.returncode == 0, done.stderr
