"""Which text a run reads, and how it is cut into documents (stdlib only).

``data.paths`` names files, folders (read recursively) and globs; ``None`` means the ``.py``
files of the running Python's standard library. The order is deterministic: arguments as
given, the files of a folder or glob sorted, each file once.

A document is a file, unless the file is longer than 1/256 of the whole text (or 1 Mi
characters): such files are cut at line ends, so that every part of ``data.split`` gets
some text even where ``data.paths`` is one file. Megatron splits by documents.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from nemo_uneven_tp.errors import UserError

SPLIT_NAMES = ("train", "validation", "test")
_SNIFFED_BYTES = 65536
_COUNTED_BYTES = 64 << 20
_PARTS = 256
_MIN_DOCUMENT_CHARACTERS = 256
_MAX_DOCUMENT_CHARACTERS = 1 << 20
_NOT_STDLIB_CODE = {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "site-packages",
    "test",
    "tests",
}
"""Folders of the standard library left out: other people's packages, and tests (some of
their files are broken on purpose)."""


def resolve_text_files(paths: str | Sequence[str] | None) -> list[Path]:
    """The text files that ``data.paths`` names, absolute, in the order they are read.

    Hidden entries and empty files inside folders and globs are left out; symbolic links to
    folders are not followed. Every file is opened and its beginning checked for being text.

    Raises:
        UserError: a path is missing, unreadable, empty or not UTF-8 text, or nothing is left.
    """
    if paths is None:
        found = _standard_library_files()
        if not found:
            raise UserError(
                "data.paths=null means the .py files of Python's standard library, and this Python "
                "has none on disk; set data.paths to your text files"
            )
    else:
        named = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
        if not named:
            raise UserError("data.paths=[] names no text; give files, folders or globs, or null")
        found = [file for path in named for file in _files_of(path)]
    files = list(dict.fromkeys(found))
    for file in files:
        _check_beginning(file)
    return files


def fingerprint(files: Iterable[Path]) -> str:
    """A digest that changes when a file is added, removed, renamed, reordered or written to.

    Made of path, size, and modification and status-change time (ns): the last moves on any
    write, also when a copying tool sets the modification time back.
    """
    digest = hashlib.sha256()
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise _cannot_read(file, error) from error
        digest.update(
            f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ctime_ns}\n".encode()
        )
    return digest.hexdigest()


def documents(files: Sequence[Path]) -> Iterator[str]:
    """The text of ``files``, document by document (see the module docstring).

    Raises:
        UserError: a file cannot be read, or is not UTF-8 text.
    """
    total = sum(file.stat().st_size for file in files)
    limit = min(max(total // _PARTS, _MIN_DOCUMENT_CHARACTERS), _MAX_DOCUMENT_CHARACTERS)
    for file in files:
        try:
            # newline="": line ends are part of the text and stay as they are.
            with open(file, encoding="utf-8", newline="") as stream:
                while text := stream.read(limit):
                    if len(text) == limit and not text.endswith("\n"):
                        text += stream.readline(limit)
                    if "\0" in text:
                        raise _not_text(file)
                    yield text
        except UnicodeDecodeError as error:
            raise _not_text(file) from error
        except OSError as error:
            raise _cannot_read(file, error) from error


def split_weights(split: str) -> tuple[float, float, float]:
    """The weights of train, validation and test in ``data.split``, as Megatron reads them.

    Raises:
        UserError: not one to three non-negative numbers, or nothing for training.
    """
    parts = [part.strip() for part in str(split).split(",")]
    if not 1 <= len(parts) <= 3 or not all(re.fullmatch(r"\d+\.?\d*|\.\d+", p) for p in parts):
        raise UserError(
            f"data.split={split!r} must be up to three numbers, the weights of train, validation "
            "and test, such as '900,50,50'"
        )
    weights = [float(part) for part in parts] + [0.0] * (3 - len(parts))
    if weights[0] <= 0:
        raise UserError(f"data.split={split!r} leaves nothing for training; make the first > 0")
    return (weights[0], weights[1], weights[2])


def check_split(
    document_tokens: Sequence[int], split: str, seq_length: int, limit_val_batches: float = 0
) -> None:
    """Refuse a text too small for its split (Megatron would loop for ever on an empty part).

    Args:
        document_tokens: tokens of each document, end-of-document token included.
        split: ``data.split``.
        seq_length: ``model.seq_length``; every part with a weight must hold one sample, which
            is ``seq_length + 1`` tokens.
        limit_val_batches: ``trainer.limit_val_batches``; more than 0 needs a validation part.

    Raises:
        UserError: a part of the split holds too little.
    """
    weights = split_weights(split)
    if limit_val_batches and not weights[1]:
        raise UserError(
            f"trainer.limit_val_batches={limit_val_batches} needs text for validation, and "
            f"data.split={split!r} gives it none; set the second weight, or limit_val_batches=0"
        )
    done = 0.0
    for name, weight in zip(SPLIT_NAMES, weights, strict=True):
        # The rounding is Megatron's (BlendedMegatronDatasetBuilder).
        first = round(done / sum(weights) * len(document_tokens))
        done += weight
        last = round(done / sum(weights) * len(document_tokens))
        tokens = sum(document_tokens[first:last])
        if weight and tokens < seq_length + 1:
            raise UserError(
                f"data.paths holds too little text: {name} gets {tokens} of "
                f"{sum(document_tokens)} tokens (data.split={split!r}), and one sample of "
                f"model.seq_length={seq_length} needs {seq_length + 1}; give more text, set that "
                "weight of data.split to 0 or larger, or lower model.seq_length"
            )


def check_text(
    paths: str | Sequence[str] | None,
    tokenizer: str,
    split: str,
    seq_length: int,
    limit_val_batches: float = 0,
) -> list[Path]:
    """:func:`resolve_text_files`, and :func:`check_split` where that needs no tokenizer.

    With the byte tokenizer, up to 64 MiB of text are read here and now, so that bad or too
    little text is found before a process starts; more is checked when it is tokenized.
    """
    files = resolve_text_files(paths)
    split_weights(split)
    if tokenizer == "byte" and sum(file.stat().st_size for file in files) <= _COUNTED_BYTES:
        lengths = [len(text.encode()) + 1 for text in documents(files)]
        check_split(lengths, split, seq_length, limit_val_batches)
    return files


def _files_of(path: str | os.PathLike[str]) -> list[Path]:
    """Files named by one entry of ``data.paths``."""
    name = os.path.abspath(os.path.expanduser(os.fspath(path)))
    if os.path.isdir(name):
        found = _files_below(name)
        kind = "folder"
    elif os.path.lexists(name):
        return [Path(name)]
    elif glob.has_magic(name):
        found = sorted(
            file
            for match in glob.glob(name, recursive=True)
            for file in (_files_below(match) if os.path.isdir(match) else [match])
        )
        kind = "glob"
    else:
        raise UserError(f"data.paths: {path} does not exist; give text files, folders or globs")
    files = [Path(file) for file in found if not _is_empty(file)]
    if not files:
        raise UserError(f"data.paths: the {kind} {path} holds no text; name files that do")
    return files


def _files_below(folder: str, left_out: Iterable[str] = (), suffix: str = "") -> list[str]:
    """Regular, not hidden files below ``folder``, sorted by path."""

    def refuse(error: OSError) -> None:
        raise _cannot_read(Path(error.filename or folder), error) from error

    found = []
    for where, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(f for f in folders if f not in left_out and not f.startswith("."))
        for name in names:
            if not name.startswith(".") and name.endswith(suffix):
                found.append(os.path.join(where, name))
    return sorted(found)


def _standard_library_files() -> list[Path]:
    """The ``.py`` files of the running Python's standard library."""
    folder = sysconfig.get_path("stdlib")
    found = _files_below(folder, _NOT_STDLIB_CODE, ".py") if os.path.isdir(folder) else []
    return [Path(file) for file in found if not _is_empty(file)]


def _is_empty(file: str) -> bool:
    """Whether the file has no byte (a dangling link counts as not empty: it gets its own error)."""
    try:
        return os.path.getsize(file) == 0 and os.path.isfile(file)
    except OSError:
        return False


def _check_beginning(file: Path) -> None:
    """Refuse what is no regular, readable, non-empty file beginning with text."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"data.paths: {file} is not a regular file; give text files")
        with open(file, "rb") as stream:
            beginning = stream.read(_SNIFFED_BYTES)
    except OSError as error:
        raise _cannot_read(file, error) from error
    if not beginning:
        raise UserError(f"data.paths: {file} is empty; give a file with text in it")
    try:
        beginning.decode("utf-8")
    except UnicodeDecodeError as error:
        cut_off = len(beginning) == _SNIFFED_BYTES and error.start >= len(beginning) - 3
        if not cut_off:
            raise _not_text(file) from error
    if b"\0" in beginning:
        raise _not_text(file)


def _not_text(file: Path) -> UserError:
    return UserError(
        f"data.paths: {file} is not UTF-8 text; leave it out (a glob such as 'folder/**/*.txt' "
        "picks files by name) or convert it"
    )


def _cannot_read(file: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(
        f"data.paths: cannot read {file} ({reason}); fix its permissions or name another"
    )
