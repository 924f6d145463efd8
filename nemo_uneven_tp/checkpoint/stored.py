"""What a checkpoint holds, read from its metadata alone (torch, no process group)."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, Metadata, TensorStorageMetadata

from nemo_uneven_tp.checkpoint.files import weights_of


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint: its key, global shape, dtype, bytes and number of chunks."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    chunks: int


def read_metadata(path: Path) -> Metadata:
    """The metadata of a ``torch_dist`` checkpoint.

    Raises:
        ValueError: if it can't be read.
    """
    try:
        return FileSystemReader(weights_of(path)).read_metadata()
    except (
        OSError,
        EOFError,
        pickle.UnpicklingError,
        AttributeError,
        IndexError,
        KeyError,
    ) as error:
        raise ValueError(f".metadata can't be read ({error})") from error


def stored_tensors(metadata: Metadata) -> list[StoredTensor]:
    """Every tensor of a checkpoint, by key."""
    found = []
    for key, entry in sorted(metadata.state_dict_metadata.items()):
        if isinstance(entry, TensorStorageMetadata):
            dtype = entry.properties.dtype
            found.append(
                StoredTensor(
                    key,
                    tuple(entry.size),
                    str(dtype).removeprefix("torch."),
                    entry.size.numel() * dtype.itemsize,
                    len(entry.chunks),
                )
            )
    return found


def short_files(path: Path, metadata: Metadata) -> list[str]:
    """Data files that end before what the metadata places in them, one sentence each.

    All that can be told about a stock checkpoint, which has no checksums.
    """
    ends: dict[str, int] = {}
    storage: dict[Any, Any] = metadata.storage_data
    for item in storage.values():
        name = item.relative_path
        ends[name] = max(ends.get(name, 0), item.offset + item.length)
    found = []
    for name, end in sorted(ends.items()):
        file = weights_of(path) / name
        if not file.is_file():
            found.append(f"{name} is missing")
        elif file.stat().st_size < end:
            found.append(f"{name} has {file.stat().st_size} bytes, at least {end} belong there")
    return found
