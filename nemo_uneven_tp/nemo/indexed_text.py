"""Text files to Megatron's ``.bin``/``.idx``, tokenized once and cached.

An entry of the cache is a folder ``<key>/`` with ``text.bin``, ``text.idx`` and
``manifest.json``; the key is made of the files' fingerprint, the tokenizer's identity and
this format's version, so a changed source is another entry. What keeps it safe:

* An entry appears by renaming a finished temporary folder: a killed build leaves no entry.
* Sizes and checksums in the manifest are compared before use: a damaged entry is rebuilt.
* One process builds, behind a file lock that the system frees when its holder dies; the
  others wait for it, however they were started (no process group is needed).

Relies on Megatron-Core's ``IndexedDatasetBuilder``; does not import NeMo.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from nemo_uneven_tp import text_files
from nemo_uneven_tp.errors import UserError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
LOCK_TIMEOUT_S = 3600.0
_REPORT_EVERY_S = 10.0
_CHECKED_BYTES = 1 << 30
"""The checksum of a ``text.bin`` up to this size is compared at every start (about 1 s);
for larger ones the size and the index's checksum have to do."""


class Tokenizer(Protocol):
    """What the builder needs of a tokenizer (NeMo's ``TokenizerSpec`` has it)."""

    vocab_size: int

    @property
    def eod(self) -> int:
        """The id that closes a document."""

    def text_to_ids(self, text: str) -> list[int]:
        """The ids of ``text``, without special ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an entry holds, written last; sizes in bytes, checksums BLAKE2b."""

    bin_bytes: int
    idx_bytes: int
    bin_checksum: str
    idx_checksum: str
    documents: int
    tokens: int


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/nemo-uneven-tp/text``, by default below ``~/.cache``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "nemo-uneven-tp" / "text"


def prefix_of(entry: Path) -> Path:
    """The path prefix that Megatron wants: the entry's files without ``.bin`` and ``.idx``."""
    return entry / "text"


def document_tokens(entry: Path) -> list[int]:
    """Tokens of each document of a built entry."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    # Keep the data set in a name: its arrays lie in a mapped file that it unmaps when it goes.
    dataset = IndexedDataset(str(prefix_of(entry)))
    lengths: list[int] = dataset.sequence_lengths.tolist()
    return lengths


def ensure_indexed(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    tokenizer_identity: str,
    cache_dir: Path | None = None,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> Path:
    """The cache entry for ``files``, built if it is missing or damaged.

    Call it in every process of a job: one builds, the rest wait, at most ``lock_timeout_s``.

    Args:
        files: the text, as :func:`text_files.resolve_text_files` returns it.
        tokenizer: turns text into ids and closes each document with ``eod``.
        tokenizer_identity: a digest of what the tokenizer is made of.
        cache_dir: where entries live; ``None`` for :func:`default_cache_dir`.
        lock_timeout_s: longest wait for another process that builds the same entry, seconds.

    Raises:
        UserError: the text is bad, the folder cannot be written, or the wait was too long.
    """
    folder = (cache_dir or default_cache_dir()).expanduser().absolute()
    source = text_files.fingerprint(files)
    key = hashlib.sha256(f"{FORMAT_VERSION}\0{tokenizer_identity}\0{source}".encode())
    entry = folder / key.hexdigest()[:32]
    if read_manifest(entry) is not None:
        return entry
    with _cache_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f"{entry.name}.lock", lock_timeout_s, "the same text"):
            if read_manifest(entry) is not None:
                return entry
            _remove_leftovers(folder, entry.name)
            temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=folder))
            try:
                _build(files, tokenizer, temporary)
                if text_files.fingerprint(files) != source:
                    raise UserError(
                        "data.paths: a file changed while it was being tokenized; start again"
                    )
                _replace(temporary, entry)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return entry


def read_manifest(entry: Path) -> Manifest | None:
    """The manifest of an undamaged entry, else ``None``."""
    try:
        manifest = Manifest(**json.loads((entry / "manifest.json").read_text(encoding="utf-8")))
        text_bin, text_idx = entry / "text.bin", entry / "text.idx"
        sizes = (text_bin.stat().st_size, text_idx.stat().st_size)
        sound = (
            sizes == (manifest.bin_bytes, manifest.idx_bytes)
            and _checksum(text_idx) == manifest.idx_checksum
            and (sizes[0] > _CHECKED_BYTES or _checksum(text_bin) == manifest.bin_checksum)
        )
    except (OSError, ValueError, TypeError):
        sound = False
    if not sound:
        if entry.exists():
            logger.warning("%s is damaged or incomplete and will be built again", entry)
        return None
    return manifest


@contextmanager
def locked(lock_file: Path, timeout_s: float, waiting_for: str) -> Iterator[None]:
    """Hold ``lock_file``; report every 10 s that we wait, and give up after ``timeout_s``.

    Raises:
        UserError: another process held the lock all the time.
    """
    # Not thread-local and not inherited as held: the lock belongs to this process alone.
    lock = FileLock(lock_file, thread_local=False)
    give_up_at = time.monotonic() + timeout_s
    while True:
        left = give_up_at - time.monotonic()
        try:
            lock.acquire(timeout=max(0.0, min(left, _REPORT_EVERY_S)), poll_interval=0.05)
            break
        except Timeout:
            if left <= _REPORT_EVERY_S:
                raise UserError(
                    f"another process has held {lock_file} for {timeout_s:.0f} s, preparing "
                    f"{waiting_for}; wait for it, end it, or set data.cache_dir to another folder"
                ) from None
            logger.info("waiting for another process that prepares %s", waiting_for)
    try:
        yield
    finally:
        lock.release()


def _build(files: Sequence[Path], tokenizer: Tokenizer, folder: Path) -> None:
    """Tokenize ``files`` into ``folder``, manifest last."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    total_bytes = sum(file.stat().st_size for file in files)
    logger.info("tokenizing %d files, %.1f MB", len(files), total_bytes / 1e6)
    text_bin, text_idx = folder / "text.bin", folder / "text.idx"
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builder = IndexedDatasetBuilder(str(text_bin), dtype=dtype)
    done_bytes = count = tokens = 0
    started = reported = time.monotonic()
    try:
        for text in text_files.documents(files):
            ids = np.array([*tokenizer.text_to_ids(text), tokenizer.eod])
            if ids.min() < 0 or ids.max() > np.iinfo(dtype).max:
                raise UserError(
                    f"data.tokenizer gives token id {ids.min() if ids.min() < 0 else ids.max()}, "
                    f"outside its own vocabulary of {tokenizer.vocab_size}; check the tokenizer"
                )
            builder.add_document(ids, [len(ids)])
            count, tokens = count + 1, tokens + len(ids)
            done_bytes += len(text.encode())
            if time.monotonic() - reported > _REPORT_EVERY_S:
                reported = time.monotonic()
                share = done_bytes / total_bytes
                logger.info("tokenizing: %.1f MB, %.0f %%", done_bytes / 1e6, 100 * share)
        builder.finalize(str(text_idx))
    finally:
        builder.data_file.close()
    manifest = Manifest(
        bin_bytes=text_bin.stat().st_size,
        idx_bytes=text_idx.stat().st_size,
        bin_checksum=_checksum(text_bin),
        idx_checksum=_checksum(text_idx),
        documents=count,
        tokens=tokens,
    )
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2), encoding="utf-8")
    logger.info("%d documents, %d tokens, in %.1f s", count, tokens, time.monotonic() - started)


def _replace(temporary: Path, entry: Path) -> None:
    """Put the finished folder in place; a damaged entry goes out of the way first."""
    if entry.exists():
        damaged = Path(tempfile.mkdtemp(prefix=f"{entry.name}.tmp-", dir=entry.parent))
        os.rename(entry, damaged / "damaged")
        shutil.rmtree(damaged, ignore_errors=True)
    os.chmod(temporary, 0o777 & ~_umask())  # mkdtemp makes it private
    os.rename(temporary, entry)


def _remove_leftovers(folder: Path, own_key: str) -> None:
    """Delete what killed builds left: temporary folders whose lock nobody holds."""
    for leftover in folder.glob("*.tmp-*"):
        key = leftover.name.split(".tmp-")[0]
        if key == own_key:  # we hold this lock
            shutil.rmtree(leftover, ignore_errors=True)
            continue
        lock = FileLock(folder / f"{key}.lock", thread_local=False)
        try:
            with lock.acquire(timeout=0):
                shutil.rmtree(leftover, ignore_errors=True)
        except Timeout:
            pass


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Turn a full or read-only cache folder into one sentence."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"data.cache_dir={folder} cannot be used ({error.strerror or error}); set "
            "data.cache_dir to a folder with room that this user can write"
        ) from error


def _checksum(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, _blake2b).hexdigest()


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=16)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
