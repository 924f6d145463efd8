"""Checksums of a checkpoint, computed and compared by all ranks: each reads a part of the files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nemo_uneven_tp.checkpoint import files
from nemo_uneven_tp.checkpoint.stored import read_metadata, short_files


def write_manifest_together(path: Path, about: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint; every rank reads an equal part of the files."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names: list[list[str]] = [files.files_of(path) if rank == 0 else []]
    dist.broadcast_object_list(names, 0)
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, files.measure(path, names[0][rank::size]))
    if rank == 0:
        merged = {name: part[name] for part in parts for name in part}
        files.write_manifest(path, merged, about)


def damages_together(path: Path) -> list[str]:
    """What is wrong with a checkpoint, the same on all ranks; every rank reads a part of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = files.damages(path, slice(rank, None, size))
    if rank == 0 and not files.has_checksums(path):
        try:
            found = short_files(path, read_metadata(path))
        except ValueError as error:
            found = [str(error)]
    parts: list[Any] = [None] * size
    dist.all_gather_object(parts, found)
    return list(dict.fromkeys(damage for part in parts for damage in part))
