"""A stock NeMo run on CPU, end to end: losses, files, and what reaches NeMo's objects."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nemo.lightning")

from nemo_uneven_tp import run_files
from nemo_uneven_tp.cli.pretrain import Run, prepare
from nemo_uneven_tp.events import EVENTS_FILE

STEPS = 5
STDLIB = Path(sysconfig.get_paths()["stdlib"])
TEXT = ",".join(str(STDLIB / name) for name in ("argparse.py", "inspect.py", "typing.py"))
# The same function at every degree: no gate, and a vocabulary that is padded alike.
PLAIN = ("model.gated_linear_unit=false", "model.activation=gelu", "model.ffn_hidden_size=344")
SIZES = ("model.num_layers=2", "model.seq_length=64", f"trainer.max_steps={STEPS}")


def prepared(folder: Path, *overrides: str) -> Run:
    """A stock run in ``folder / "run"``, not started."""
    run = prepare(
        "test",
        [
            "uneven_tp=off",
            f"data.paths=[{TEXT}]",
            f"data.cache_dir={folder / 'cache'}",
            f"run_dir={folder / 'run'}",
            *SIZES,
            *overrides,
        ],
    )
    assert run is not None
    return run


def start(run: Run, command: list[str]) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    """Run a command on a created run directory: its stdout, metrics and result."""
    run_files.create(run.run_dir, run.config, run.plan)
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [*command, "nemo_uneven_tp.worker", str(run.run_dir)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    log = run.run_dir / run_files.LOG_FILE
    assert done.returncode == 0, done.stderr + log.read_text(encoding="utf-8")
    lines = (run.run_dir / run_files.METRICS_FILE).read_text(encoding="utf-8").splitlines()
    result = json.loads((run.run_dir / run_files.RESULT_FILE).read_text(encoding="utf-8"))
    return done.stdout, [json.loads(line) for line in lines], result


@pytest.mark.timeout(500)
def test_tp2_dp2_and_tp1_dp1_train_alike(tmp_path_factory: pytest.TempPathFactory) -> None:
    four = prepared(tmp_path_factory.mktemp("four"), *PLAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "-m"]
    console, metrics, result = start(four, [*torchrun])
    one = prepared(
        tmp_path_factory.mktemp("one"),
        *PLAIN,
        "trainer.devices=1",
        "strategy.tensor_model_parallel_size=1",
    )
    _, alone, result_alone = start(one, [sys.executable, "-m"])

    losses = [line["loss"] for line in metrics]
    assert [line["step"] for line in metrics] == list(range(STEPS))
    for loss, other in zip(losses, (line["loss"] for line in alone), strict=True):
        assert math.isclose(loss, other, rel_tol=1e-5)
    for line, other in zip(metrics, alone, strict=True):
        assert math.isclose(line["grad_norm"], other["grad_norm"], rel_tol=1e-4)
        assert line["lr"] == other["lr"]
    assert losses[-1] < losses[0] - 0.5

    batch = four.config["data"]["global_batch_size"]
    last = metrics[-1]
    assert last["tokens"] == batch * 64
    assert last["consumed_samples"] == batch * STEPS
    assert last["step_time_s"] > 0
    assert result == {
        "steps": STEPS,
        "final_loss": losses[-1],
        "tokens": STEPS * batch * 64,
        "replicas_equal": True,
    }
    assert result_alone["replicas_equal"] is None

    # One line per step and nothing else on the terminal; no files but ours.
    assert len(console.splitlines()) == STEPS
    assert all(re.match(rf"step \d/{STEPS}  loss \d", line) for line in console.splitlines())
    assert {path.name for path in four.run_dir.iterdir()} == {
        run_files.CONFIG_FILE,
        run_files.PLAN_FILE,
        run_files.METRICS_FILE,
        run_files.LOG_FILE,
        run_files.RESULT_FILE,
        EVENTS_FILE,
    }
    assert "Transformer Engine" in (four.run_dir / run_files.LOG_FILE).read_text(encoding="utf-8")


def test_stock_objects_are_nemos_own(tmp_path: Path) -> None:
    from nemo import lightning as nl

    from nemo_uneven_tp.nemo import pretrain

    run = prepared(
        tmp_path,
        "model.activation=squared_relu",
        "model.gated_linear_unit=false",
        "+model.fp32_residual_connection=true",
        "strategy.overlap_grad_reduce=true",
        "strategy.bucket_size=1000",
        "optim.use_distributed_optimizer=true",
    )
    strategy = pretrain.build_strategy(run.config, run.plan, on_cpu=False)
    assert type(strategy) is nl.MegatronStrategy
    assert strategy.tensor_model_parallel_size == 2
    assert strategy.ddp_config.overlap_grad_reduce
    assert strategy.ddp_config.bucket_size == 1000
    assert strategy.ddp_config.use_distributed_optimizer

    optimizer = pretrain.build_optimizer(run.config)
    assert optimizer.config.use_distributed_optimizer
    assert optimizer.config.lr == run.config["optim"]["lr"]
    assert optimizer.lr_scheduler.min_lr == run.config["optim"]["min_lr"]

    model = pretrain.gpt_config(run.config, run.plan, on_cpu=False)
    assert model.activation_func.__name__ == "squared_relu"
    assert model.fp32_residual_connection
    assert model.vocab_size is None
    assert not model.use_cpu_initialization
    assert pretrain.gpt_config(run.config, run.plan, on_cpu=True).use_cpu_initialization


def test_stock_takes_the_reference_vocabulary(tmp_path: Path) -> None:
    from nemo_uneven_tp.initial_weights import StockReferenceInit
    from nemo_uneven_tp.nemo import pretrain

    options = ("model.reference_tensor_parallel_size=4", "model.make_vocab_size_divisible_by=100")
    run = prepared(tmp_path, *PLAIN, *options)
    assert pretrain.gpt_config(run.config, run.plan, on_cpu=True).vocab_size == 800
    gated = prepared(tmp_path, "model.ffn_hidden_size=344", *options)
    config = pretrain.gpt_config(gated.config, gated.plan, on_cpu=True)
    assert isinstance(config.init_method, StockReferenceInit)


def test_seed_reaches_nemo(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from nemo.lightning import _strategy_lib
    from nemo.lightning.pytorch.strategies.utils import setup_parallel_ranks

    from nemo_uneven_tp.errors import UserError
    from nemo_uneven_tp.nemo.pretrain import seeded

    seeds: list[int] = []

    def record(*args: Any, seed: int = 1234) -> None:
        seeds.append(seed)

    monkeypatch.setattr(_strategy_lib, "init_parallel_ranks", record)
    environment = SimpleNamespace(world_size=lambda: 1, global_rank=lambda: 0, local_rank=lambda: 0)
    strategy: Any = SimpleNamespace(cluster_environment=environment, parallelism=None)
    with seeded(7):
        setup_parallel_ranks(strategy)
    setup_parallel_ranks(strategy)
    assert seeds == [7, 1234]
    with pytest.raises(UserError, match="seed=0"), seeded(0):
        pass
