"""``uneven-tp checkpoint verify`` on folders of files, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_uneven_tp.checkpoint import files
from tests.conftest import Outcome

Command = Callable[..., Outcome]


def make(folder: Path, step: int) -> Path:
    """A checkpoint with a manifest."""
    path = folder / "checkpoints" / f"step_{step}"
    (path / "weights").mkdir(parents=True)
    for name in (*files.REQUIRED, "__0_0.distcp"):
        (path / "weights" / name).write_bytes(name.encode() * 9)
    about = {
        "run": "test",
        "step": step,
        "uneven_tp": True,
        "degrees": [2, 1],
        "tensor_model_parallel_size": 2,
        "precision": "32",
        "use_distributed_optimizer": True,
    }
    files.write_manifest(path, files.measure(path, files.files_of(path)), about)
    return path


def test_whole(uneven_tp: Command, tmp_path: Path) -> None:
    make(tmp_path / "run", 3)
    make(tmp_path / "run", 6)
    outcome = uneven_tp("checkpoint", "verify", str(tmp_path / "run"))
    assert outcome.code == 0
    assert outcome.out.index("step_6") < outcome.out.index("step_3")
    assert "degrees [2, 1]" in outcome.out


def test_damaged(uneven_tp: Command, tmp_path: Path) -> None:
    make(tmp_path / "run", 3)
    (make(tmp_path / "run", 6) / "weights" / "__0_0.distcp").write_bytes(b"short")
    outcome = uneven_tp("checkpoint", "verify", "--json", str(tmp_path / "run"))
    assert outcome.code == 1
    newest, older = json.loads(outcome.out)
    assert newest["damages"] == ["weights/__0_0.distcp has 5 bytes instead of 108"]
    assert older["damages"] == []


def test_not_complete(uneven_tp: Command, tmp_path: Path) -> None:
    path = make(tmp_path, 3)
    path.with_name("step_3-unfinished").touch()
    outcome = uneven_tp("checkpoint", "verify", str(path))
    assert outcome.code == 1
    assert "interrupted" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("verify",), "usage is"),
        (("look", "."), "usage is"),
        (("verify", "nowhere"), "is not a folder"),
        (("inspect", "."), "holds no checkpoint"),
    ],
)
def test_refused(uneven_tp: Command, arguments: tuple[str, ...], said: str) -> None:
    outcome = uneven_tp("checkpoint", *arguments)
    assert outcome.code == 2
    assert said in outcome.err
