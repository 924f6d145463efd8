"""Finding checkpoints, telling complete from broken, telling whole from damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_uneven_tp.checkpoint import files
from nemo_uneven_tp.errors import UserError


def make(folder: Path, name: str, manifest: bool = True) -> Path:
    """A checkpoint folder with small files."""
    path = folder / name
    (path / "weights").mkdir(parents=True)
    for required in files.REQUIRED:
        (path / "weights" / required).write_bytes(required.encode())
    (path / "weights" / "__0_0.distcp").write_bytes(bytes(range(256)) * 16)
    if manifest:
        measures = files.measure(path, files.files_of(path))
        files.write_manifest(path, measures, {"step": 3})
    return path


def test_the_newest_comes_first(tmp_path: Path) -> None:
    for step in (3, 12, 9):
        make(tmp_path / "checkpoints", f"step_{step}")
    (tmp_path / "checkpoints" / "step_12-last").symlink_to("step_12")
    make(
        tmp_path / "checkpoints", "nemo--val_loss=1.00-step=20-consumed_samples=9.0", manifest=False
    )
    found = files.find(tmp_path)
    assert [checkpoint.step for checkpoint in found] == [20, 12, 9, 3]
    assert all(checkpoint.problem is None for checkpoint in found)
    assert files.find(found[1].path) == [found[1]]
    assert files.find(found[1].weights) == [found[1]]


def test_broken_ones_are_told(tmp_path: Path) -> None:
    make(tmp_path, "step_1")
    make(tmp_path, "step_2")
    (tmp_path / "step_2-unfinished").touch()
    (make(tmp_path, "step_3", manifest=False) / "weights" / ".metadata").unlink()
    found = files.find(tmp_path)
    assert [c.problem is None for c in found] == [False, False, True]
    assert [c.step for c in files.complete(found)] == [1]
    assert files.complete_from(tmp_path) == files.complete(found)
    with pytest.raises(UserError, match="no complete checkpoint .step_2: NeMo was interrupted"):
        files.complete_from(tmp_path / "step_2")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a folder"):
        files.find(tmp_path / "nothing")
    assert files.find(tmp_path) == []


def test_every_damage_is_found(tmp_path: Path) -> None:
    for name in files.files_of(make(tmp_path, "sample")):
        for what in ("truncated", "flipped", "removed"):
            path = make(tmp_path, f"{name.replace('/', '_')}-{what}")
            assert files.damages(path) == []
            file = path / name
            content = bytearray(file.read_bytes())
            if what == "removed":
                file.unlink()
            elif what == "truncated":
                file.write_bytes(content[:-1])
            else:
                content[len(content) // 2] ^= 1
                file.write_bytes(content)
            (damage,) = files.damages(path)
            assert name in damage


def test_a_damaged_manifest_is_found(tmp_path: Path) -> None:
    path = make(tmp_path, "step_1")
    manifest = path / files.MANIFEST
    text = manifest.read_text()
    for position in range(0, len(text), 7):
        manifest.write_text(text[:position] + chr(ord(text[position]) ^ 1) + text[position + 1 :])
        (damage,) = files.damages(path)
        assert files.MANIFEST in damage
    for length in (0, len(text) // 2, len(text) - 1):
        manifest.write_text(text[:length])
        assert files.damages(path)
    manifest.unlink()
    assert files.damages(path) == [f"{files.MANIFEST} is missing"]


def test_a_lost_file_of_a_complete_one_is_a_damage(tmp_path: Path) -> None:
    path = make(tmp_path, "step_1")
    (path / "weights" / "common.pt").unlink()
    (found,) = files.find(tmp_path)
    assert found.problem is None
    (damage,) = files.damages(path)
    assert "common.pt" in damage


def test_ranks_share_the_work(tmp_path: Path) -> None:
    path = make(tmp_path, "step_1")
    (path / "weights" / "common.pt").write_bytes(b"?")
    shares = [files.damages(path, slice(rank, None, 2)) for rank in range(2)]
    assert sum(len(share) for share in shares) == 1
