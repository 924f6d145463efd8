"""The files of a checkpoint: which are there, whether it is complete, whether it is damaged.

A checkpoint is a folder as NeMo makes it: ``weights/`` in Megatron's ``torch_dist`` format and
perhaps ``context/``. Ours also holds a manifest, written when everything else is on disk, with
the size and CRC-32 of every file, and a small file that tells that there must be a manifest.
Stock checkpoints have neither; they count as complete by NeMo's and Megatron's own marks.
Standard library only.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_uneven_tp.errors import UserError

MANIFEST = "uneven_tp.json"
MANIFEST_FORMAT = 1
MARK = "uneven_tp.checked"
"""Tells a checkpoint that has lost its manifest from a stock one."""
FOLDER = "checkpoints"
"""Where checkpoints lie in a run directory: NeMo's name."""
WEIGHTS = "weights"
UNFINISHED = "-unfinished"
"""NeMo puts a file ``<checkpoint>-unfinished`` beside a checkpoint that it writes or removes."""
REQUIRED = ("metadata.json", ".metadata", "common.pt")
"""What Megatron writes into every ``torch_dist`` checkpoint, the first of them last."""

_CHUNK = 1 << 22
_STEP = re.compile(r"(?:^|[^a-z])step[=_](\d+)")

Measures = dict[str, tuple[int, int]]
"""Path in the checkpoint -> size in bytes, CRC-32."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder. ``problem`` says why it is not complete, ``None`` if it is."""

    path: Path
    step: int
    problem: str | None

    @property
    def weights(self) -> Path:
        """Where Megatron's files are."""
        return weights_of(self.path)


def weights_of(path: Path) -> Path:
    """The folder with Megatron's files of the checkpoint ``path``."""
    return path / WEIGHTS if (path / WEIGHTS).is_dir() else path


def is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is, or was meant to be, a checkpoint folder."""
    return path.is_dir() and (
        (path / WEIGHTS).is_dir()
        or (path / MANIFEST).exists()
        or any((path / name).exists() for name in REQUIRED)
    )


def find(place: Path) -> list[Checkpoint]:
    """The checkpoints at ``place``, newest first, complete or not.

    Args:
        place: a checkpoint folder, its ``weights``, a run directory, or a folder of checkpoints.

    Raises:
        UserError: if there is no such folder.
    """
    if not place.is_dir():
        raise UserError(f"{place} is not a folder; give a run directory or a checkpoint folder")
    if place.name == WEIGHTS and not (place / WEIGHTS).is_dir():
        place = place.parent
    if is_checkpoint(place):
        return [_look_at(place)]
    folder = place / FOLDER if (place / FOLDER).is_dir() else place
    # A link such as NeMo's "...-last" stands for a checkpoint that is listed itself.
    paths = [p for p in folder.iterdir() if is_checkpoint(p) and not p.is_symlink()]
    found = [_look_at(path) for path in paths]
    return sorted(found, key=lambda c: (c.step, c.path.stat().st_mtime), reverse=True)


def _look_at(path: Path) -> Checkpoint:
    problem = None
    marker = path.with_name(path.name + UNFINISHED)
    missing = [name for name in REQUIRED if not (weights_of(path) / name).is_file()]
    if marker.exists():
        problem = "NeMo was interrupted while it wrote or removed it"
    elif missing and not has_checksums(path):  # else it was complete, and is damaged
        problem = f"{missing[0]} is missing"
    return Checkpoint(path, _step_of(path), problem)


def _step_of(path: Path) -> int:
    match = _STEP.search(path.name)
    if match:
        return int(match[1])
    try:
        return int(read_manifest(path)["about"]["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return -1


def has_checksums(path: Path) -> bool:
    """Whether a checkpoint was written with a manifest, even if that is lost or damaged."""
    return (path / MANIFEST).exists() or (path / MARK).exists()


def files_of(path: Path) -> list[str]:
    """The files of a checkpoint, without its manifest, sorted."""
    names = (p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    return sorted(
        name for name in names if name != MANIFEST and not name.startswith(f".{MANIFEST}")
    )


def measure(path: Path, names: Iterable[str]) -> Measures:
    """Sizes and checksums of files of a checkpoint. Reads them whole, piece by piece."""
    found = {}
    for name in names:
        size, crc = 0, 0
        with (path / name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                size += len(chunk)
                crc = zlib.crc32(chunk, crc)
        found[name] = (size, crc)
    return found


def write_manifest(path: Path, files: Measures, about: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint whose files are all on disk, and its mark.

    It appears whole, and stays after a power failure.
    """
    _write_and_sync(path / MARK, f"The checksums of all files are in {MANIFEST}.\n")
    files = {**files, **measure(path, [MARK])}
    content = {"format": MANIFEST_FORMAT, "about": dict(about), "files": files}
    unfinished = path / f".{MANIFEST}.{os.getpid()}"
    _write_and_sync(unfinished, _text_of({**content, "crc32": _crc_of(content)}))
    unfinished.replace(path / MANIFEST)
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write_and_sync(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _text_of(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, sort_keys=True, indent=1) + "\n"


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        FileNotFoundError: if it has none.
        ValueError: if it is damaged.
    """
    text = (path / MANIFEST).read_bytes().decode()
    data = json.loads(text)
    # Blanks that mean nothing are compared as well.
    whole = isinstance(data, dict) and text == _text_of(data)
    if not whole or data.pop("crc32", None) != _crc_of(data):
        raise ValueError(f"{MANIFEST} is damaged")
    if data["format"] != MANIFEST_FORMAT:
        raise ValueError(f"{MANIFEST} has the format {data['format']}, not {MANIFEST_FORMAT}")
    return data


def _crc_of(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def damages(path: Path, share: slice = slice(None)) -> list[str]:
    """What is wrong with the files of a checkpoint, one sentence each; none of a stock one.

    Args:
        share: which of the files to look at, so that ranks may share the work.
    """
    try:
        files = read_manifest(path)["files"]
    except FileNotFoundError:
        return [f"{MANIFEST} is missing"] if (path / MARK).exists() else []
    except (OSError, ValueError) as error:
        return [f"{MANIFEST} can't be used ({error})"]
    found = []
    for name in sorted(files)[share]:
        size, crc = files[name]
        try:
            actual = (path / name).stat().st_size
            if actual != size:
                found.append(f"{name} has {actual} bytes instead of {size}")
            elif measure(path, [name])[name][1] != crc:
                found.append(f"{name} does not have the checksum it was written with")
        except OSError as error:
            found.append(f"{name} can't be read ({error.strerror})")
    return found


def complete(found: Iterable[Checkpoint]) -> list[Checkpoint]:
    """The complete ones of :func:`find`'s list."""
    return [checkpoint for checkpoint in found if checkpoint.problem is None]


def complete_from(place: Path) -> list[Checkpoint]:
    """The complete checkpoints that ``resume.from=PLACE`` means, newest first, at least one.

    Raises:
        UserError: if there is none.
    """
    try:
        found = find(place)
    except UserError as error:
        raise UserError(f"resume.from={error}") from error
    if complete(found):
        return complete(found)
    broken = f" ({found[0].path.name}: {found[0].problem})" if found else ""
    raise UserError(
        f"resume.from={place} holds no complete checkpoint{broken}; give a run directory or a "
        "checkpoint folder that does"
    )
