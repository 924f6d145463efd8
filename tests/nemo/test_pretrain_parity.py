"""`uneven-tp pretrain`, stock and uneven: the same losses at every step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOLERANCE = 1e-5
STEPS = 20
SMALL = [f"trainer.max_steps={STEPS}", "model.seq_length=64", "model.num_layers=2"]
TP3 = ["trainer.devices=9", "strategy.tensor_model_parallel_size=3"]
AT_ONE = "model.reference_tensor_parallel_size=1"
OVERLAP = ["strategy.overlap_grad_reduce=true", "strategy.overlap_param_gather=true"]

RUNS = {
    "stock TP1": ["uneven_tp=off", "trainer.devices=1", "strategy.tensor_model_parallel_size=1"],
    "stock TP2xDP2": ["uneven_tp=off"],
    "stock TP2xDP2 starting as TP1": ["uneven_tp=off", AT_ONE],
    "nothing failed": [],
    "TP2+TP1": ["uneven_tp.failed_ranks=[3]"],
    "TP2+TP1 starting as TP1": ["uneven_tp.degrees=[2,1]", AT_ONE],
    "TP3+TP2+TP1 starting as TP1": [*TP3, "uneven_tp.degrees=[3,2,1]", AT_ONE],
    "TP1+TP2, plain Adam, validation": [
        "uneven_tp.failed_ranks=[0]",
        "optim.use_distributed_optimizer=false",
        "trainer.val_check_interval=10",
        "trainer.limit_val_batches=1",
    ],
    "TP2+TP1, overlapped": ["uneven_tp.failed_ranks=[2]", *OVERLAP],
}


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of every run; each is a real `uneven-tp pretrain` with its own processes."""
    found = {}
    for number, (name, overrides) in enumerate(RUNS.items()):
        run_dir = tmp_path_factory.mktemp("runs") / str(number)
        command = [sys.executable, "-m", "nemo_uneven_tp", "pretrain", *SMALL, *overrides]
        done = subprocess.run(
            [*command, f"run_dir={run_dir}"], capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        found[name] = _losses(run_dir)
        result = json.loads((run_dir / "result.json").read_text())
        assert result["replicas_equal"] in (True, None), name
    return found


def _losses(run_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))
    return [line["loss"] for line in lines]


@pytest.mark.timeout(1800)
def test_nothing_failed_is_stock_bit_for_bit(curves: dict[str, list[float]]) -> None:
    assert curves["nothing failed"] == curves["stock TP2xDP2"]


@pytest.mark.parametrize(
    ("run", "reference"),
    [
        ("TP2+TP1", "stock TP2xDP2"),
        ("TP2+TP1, overlapped", "stock TP2xDP2"),
        ("TP1+TP2, plain Adam, validation", "stock TP2xDP2"),
        ("TP2+TP1 starting as TP1", "stock TP1"),
        ("TP3+TP2+TP1 starting as TP1", "stock TP1"),
        ("stock TP2xDP2 starting as TP1", "stock TP1"),
    ],
)
def test_losses_agree_at_every_step(
    curves: dict[str, list[float]], run: str, reference: str
) -> None:
    assert curves[run] == pytest.approx(curves[reference], rel=TOLERANCE)
    assert curves[run][-1] < curves[run][0] - 1, "the run learned nothing"
