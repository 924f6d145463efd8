"""Runs that save and resume through NeMo, in other layouts and after damage."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("nemo.lightning")

import torch.distributed as dist

from nemo_uneven_tp.checkpoint import files
from nemo_uneven_tp.cli.checkpoint import DAMAGED_EXIT_CODE, checkpoint
from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.nemo.checkpoint import CheckedCheckpoints, RunCheckpoints, complete_in

STEPS, FIRST = 6, 3
STDLIB = Path(sysconfig.get_paths()["stdlib"])
# A rate at which rounding does not grow.
SETTINGS = (
    f"data.paths=[{STDLIB / 'argparse.py'},{STDLIB / 'typing.py'}]",
    "model.num_layers=2",
    "model.seq_length=64",
    f"trainer.max_steps={STEPS}",
    "data.global_batch_size=6",
    "data.micro_batch_size=1",
    "optim.warmup_steps=1",
    "optim.use_distributed_optimizer=true",
    f"checkpoint.every_n_steps={FIRST}",
    "checkpoint.keep=null",
)


def pretrain(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """``uneven-tp pretrain`` to its end."""
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    environment = {k: v for k, v in os.environ.items() if k not in unset}
    cache = f"data.cache_dir={folder / 'cache'}"
    return subprocess.run(
        [sys.executable, "-m", "nemo_uneven_tp", "pretrain", *SETTINGS, cache, *overrides],
        capture_output=True,
        text=True,
        timeout=240,
        env={**environment, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )


def losses(run_dir: Path) -> list[tuple[int, float]]:
    """Step and loss of each line of ``metrics.jsonl``."""
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def assert_goes_on(found: list[tuple[int, float]], whole: list[tuple[int, float]]) -> None:
    """The steps after the first checkpoint, with the losses of the run that never stopped."""
    assert [step for step, _ in found] == list(range(FIRST, STEPS))
    expected = [loss for _, loss in whole[FIRST:]]
    assert [loss for _, loss in found] == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def degraded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run at degrees 2 and 1 in ``run``."""
    folder = tmp_path_factory.mktemp("checkpoints")
    done = pretrain(folder, f"run_dir={folder / 'run'}", "uneven_tp.failed_ranks=[3]")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.timeout(500)
def test_checkpoints_are_complete_and_checked(degraded: Path) -> None:
    found = files.find(degraded / "run")
    assert [(c.step, c.problem) for c in found] == [(6, None), (3, None)]
    assert not any(files.damages(c.path) for c in found)
    names = {p.name for p in (degraded / "run").iterdir()}
    assert names == {
        "checkpoints", "config.yaml", "events.jsonl", "metrics.jsonl", "plan.json", "result.json",
        "train.log",
    }  # fmt: skip
    command = [sys.executable, "-m", "nemo_uneven_tp", "checkpoint", "inspect", "--json"]
    shown = subprocess.run([*command, found[0].path], capture_output=True, text=True, check=True)
    (report,) = json.loads(shown.stdout)
    sizes = {tensor["key"]: tensor["bytes"] for tensor in report["tensors"]}
    model = sum(v for k, v in sizes.items() if not k.startswith("optimizer."))
    assert sum(sizes.values()) == 4 * model  # fp32: parameters, their copy, two moments
    # Each element is written once; the rest is what torch.save adds to each chunk.
    assert 4 * model < report["bytes"] < 4 * model * 1.1
    assert report["about"]["degrees"] == [2, 1]


@pytest.mark.timeout(500)
def test_stock_goes_on_where_uneven_stopped(degraded: Path) -> None:
    done = pretrain(
        degraded,
        f"run_dir={degraded / 'stock'}",
        "uneven_tp=off",
        f"resume.from={degraded / 'run' / 'checkpoints' / 'step_3'}",
    )
    assert done.returncode == 0, done.stderr
    assert_goes_on(losses(degraded / "stock"), losses(degraded / "run"))
    # And back again, its newest checkpoint being that of another layout.
    assert files.complete_from(degraded / "stock")[0].step == STEPS


@pytest.mark.timeout(700)
def test_a_damaged_checkpoint_is_not_used(degraded: Path) -> None:
    run_dir = degraded / "damaged"
    shutil.copytree(degraded / "run", run_dir, symlinks=True)
    newest = files.find(run_dir)[0]
    data = max((newest.path / "weights").iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    refused = pretrain(degraded, f"run_dir={run_dir}", "uneven_tp.failed_ranks=[3]")
    assert refused.returncode == 2
    assert "resume.auto=true" in refused.stderr
    again = (f"run_dir={run_dir}", "resume.auto=true", "uneven_tp.degrees=[1,2]")
    stopped = pretrain(degraded, *again)
    assert stopped.returncode == 2, stopped.stderr
    assert "step_6 is damaged" in stopped.stderr
    assert data.name in stopped.stderr
    assert "resume.fall_back=true" in stopped.stderr
    assert len(losses(run_dir)) == STEPS

    went_on = pretrain(degraded, *again, "resume.fall_back=true")
    assert went_on.returncode == 0, went_on.stderr
    assert f"resuming from {run_dir / 'checkpoints' / 'step_3'} instead" in went_on.stdout
    lines = losses(run_dir)
    assert_goes_on(lines[STEPS:], lines[:STEPS])
    found = files.find(run_dir)  # the last one written anew
    assert [(c.path.name, c.problem) for c in found] == [("step_6", None), ("step_3", None)]
    assert not any(files.damages(c.path) for c in found)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def damaged(content: bytes, what: str, rng: random.Random) -> tuple[bytes | None, str]:
    """What becomes of a file (``None``: removed), and how to name it."""
    place = rng.randrange(len(content))
    if what == "truncated":
        return content[:place], f"cut to {place} bytes"
    if what == "flipped":
        mask = rng.randrange(1, 256)
        changed = bytes([content[place] ^ mask])
        return content[:place] + changed + content[place + 1 :], f"byte {place} ^ {mask}"
    return None, "removed"


@pytest.mark.timeout(500)
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("seed", range(3))
def test_every_damage_of_every_file(
    degraded: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told by ``checkpoint verify``, refused by a resume, passed over if that is asked for."""
    run_dir = degraded / "run"
    newest, older = files.find(run_dir)
    assert checkpoint(("verify", str(run_dir))) == 0
    rng = random.Random(seed)
    names = [*files.files_of(newest.path), files.MANIFEST]
    assert {"weights/__0_0.distcp", "weights/common.pt", files.MARK} < set(names)
    for name in names:
        file = newest.path / name
        original = file.read_bytes()
        for what in ("truncated", "flipped", "removed"):
            content, case = damaged(original, what, rng)
            case = f"seed {seed}, {name}: {case}"
            if content is None:
                file.unlink()
            else:
                file.write_bytes(content)
            try:
                found = files.damages(newest.path)
                assert found, case
                assert Path(name).name in found[0], case
                assert checkpoint(("verify", str(newest.path))) == DAMAGED_EXIT_CODE, case
                assert_not_used(run_dir, older, case)
            finally:
                file.write_bytes(original)
    capsys.readouterr()
    assert files.damages(newest.path) == []


def assert_not_used(run_dir: Path, older: files.Checkpoint, case: str) -> None:
    """A resume stops with a sentence, and with ``resume.fall_back=true`` takes the older one."""
    said: list[str] = []
    strategy = CheckedCheckpoints()
    strategy.say = said.append
    strategy.resume_from = complete_in(run_dir, said.append)
    with pytest.raises(UserError, match="step_6 is damaged: .*resume.fall_back=true"):
        strategy._choose()
    strategy.fall_back = True
    assert strategy._choose() == older, case
    assert "step_6 is damaged" in said[-2], case
    assert said[-1] == f"resuming from {older.path} instead", case


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_is_marked_until_it_is_removed(tmp_path: Path) -> None:
    """With asynchronous saves the removal runs in the background: a kill may meet it."""
    path = tmp_path / "step_1"
    (path / "weights").mkdir(parents=True)
    files.write_manifest(path, {}, {"step": 1})
    allowed = threading.Event()

    def remove(given: str) -> None:
        assert allowed.wait(30)
        shutil.rmtree(given)

    strategy = SimpleNamespace(remove_checkpoint=remove)
    trainer = SimpleNamespace(strategy=strategy, is_global_zero=True, callbacks=[])
    callback = RunCheckpoints(tmp_path, 1, 2, {})
    callback.async_save = True
    callback._remove_checkpoint(trainer, str(path), override_async=True)
    assert [c.problem is None for c in files.find(tmp_path)] == [False]
    allowed.set()
    callback.teardown(trainer, None, "fit")
    assert list(tmp_path.glob("step_1*")) == []
