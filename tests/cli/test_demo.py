"""The demo's comparison (the runs themselves are made by tests/nemo)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_uneven_tp.cli import demo
from nemo_uneven_tp.cli.pretrain import Run
from tests.conftest import Outcome

UnevenTP = Callable[..., Outcome]


def leave(run_dir: Path, losses: list[float], equal: bool = True) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    lines = [{"step": i, "loss": x, "tokens": 96, "step_time_s": 0.5} for i, x in enumerate(losses)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (run_dir / "result.json").write_text(json.dumps({"replicas_equal": equal}))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """Runs that would have been started; each leaves three losses instead."""
    runs: list[Run] = []

    def start(run: Run) -> int:
        runs.append(run)
        leave(run.run_dir, [3.0, 2.0, 1.0])
        return 0

    monkeypatch.setattr(demo, "start", start)
    return runs


def test_stock_and_uneven(uneven_tp: UnevenTP, started: list[Run]) -> None:
    outcome = uneven_tp("demo", "trainer.max_steps=3")
    assert outcome.code == 0
    assert outcome.err == ""
    assert "largest relative loss difference over 3 steps: 0.0e+00" in outcome.out
    stock, uneven = started
    assert stock.config["uneven_tp"]["enabled"] is False
    assert (stock.plan.degrees, uneven.plan.degrees) == ((2, 2), (2, 1))
    assert stock.config["trainer"] == uneven.config["trainer"]
    assert stock.run_dir.parent == uneven.run_dir.parent
    assert stock.run_dir.parent.name.startswith("demo-")


def test_uneven_tp_overrides_go_to_the_second_run(uneven_tp: UnevenTP, started: list[Run]) -> None:
    assert uneven_tp("demo", "uneven_tp.degrees=[1,2]", "run_dir=here").code == 0
    assert started[0].plan.degrees == (2, 2)
    assert started[1].plan.degrees == (1, 2)
    assert [run.run_dir for run in started] == [
        Path.cwd() / "here" / n for n in ("stock", "uneven")
    ]


def test_a_difference_fails(
    uneven_tp: UnevenTP, started: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(run: Run) -> int:
        leave(run.run_dir, [3.0, 2.0 + 1e-4 * run.config["uneven_tp"]["enabled"]])
        return 0

    monkeypatch.setattr(demo, "start", start)
    outcome = uneven_tp("demo")
    assert outcome.code == 1
    assert "differ by more than allowed" in outcome.err


def test_unequal_replicas_fail(uneven_tp: UnevenTP, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(run: Run) -> int:
        leave(run.run_dir, [3.0], equal=not run.config["uneven_tp"]["enabled"])
        return 0

    monkeypatch.setattr(demo, "start", start)
    outcome = uneven_tp("demo")
    assert outcome.code == 1
    assert "replicas" in outcome.err
    assert "NO" in outcome.out


def test_a_failed_run_ends_the_demo(uneven_tp: UnevenTP, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "start", lambda run: 1)
    assert uneven_tp("demo").code == 1


def test_a_run_that_left_nothing_is_told(
    uneven_tp: UnevenTP, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "start", lambda run: 0)
    outcome = uneven_tp("demo")
    assert outcome.code == 2
    assert "holds no finished run" in outcome.err


def test_runs_of_different_length_differ() -> None:
    assert demo.largest_relative_difference([1.0], [1.0, 2.0]) == float("inf")
    assert demo.largest_relative_difference([2.0, 4.0], [2.0, 5.0]) == 0.25
