"""Tokenizers by one string, through NeMo's own classes.

``data.tokenizer`` is ``byte`` (NeMo's byte-level tokenizer: 512 ids, no file needed), a
sentencepiece ``.model`` file, or a folder with a Hugging Face tokenizer. Nothing is
downloaded. :func:`identity` imports neither NeMo nor torch; how many ids a tokenizer has
without importing them, :mod:`nemo_uneven_tp.config.vocabulary` tells.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_uneven_tp.errors import UserError

if TYPE_CHECKING:
    from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec

BYTE = "byte"
_HASHED_BYTES = 64 << 20
"""Files up to this size go into :func:`identity` by content; a tokenizer's are smaller, and
a model's weights may lie in the same folder."""


def build_tokenizer(name: str) -> TokenizerSpec:
    """The tokenizer that ``data.tokenizer=name`` means.

    Raises:
        UserError: no such tokenizer, it cannot be loaded, or it has no end-of-text token.
    """
    path = _path_of(name)
    if path is None:
        from nemo.collections.common.tokenizers.bytelevel_tokenizers import ByteLevelTokenizer

        return ByteLevelTokenizer()
    from nemo.collections.common.tokenizers.tokenizer_utils import get_nmt_tokenizer

    try:
        if path.is_file():
            tokenizer = get_nmt_tokenizer(library="sentencepiece", tokenizer_model=str(path))
        else:
            tokenizer = get_nmt_tokenizer(
                library="huggingface", model_name=str(path), use_fast=True
            )
    except Exception as error:  # the libraries raise many kinds for a bad file
        raise UserError(
            f"data.tokenizer={name} cannot be loaded ({_first_line(error)}); {_ALLOWED}"
        ) from error
    try:
        has_eod = tokenizer.eod is not None and tokenizer.eod >= 0
    except (AttributeError, TypeError, ValueError):
        has_eod = False
    if not has_eod:
        raise UserError(
            f"data.tokenizer={name} has no end-of-text token (eos), which closes each document; "
            "use one that has"
        )
    return tokenizer


def identity(name: str) -> str:
    """A digest of what the tokenizer is made of: the key of cached token files."""
    path = _path_of(name)
    if path is None:
        return BYTE
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file()):
        status = file.stat()
        digest.update(f"{file.name}\0{status.st_size}\0".encode())
        if status.st_size <= _HASHED_BYTES:
            digest.update(file.read_bytes())
        else:
            digest.update(str(status.st_mtime_ns).encode())
    return digest.hexdigest()


_ALLOWED = "give 'byte', a sentencepiece .model file or a folder with a Hugging Face tokenizer"


def _path_of(name: str) -> Path | None:
    """Where the tokenizer lies; ``None`` for the byte-level one."""
    if name == BYTE:
        return None
    path = Path(name).expanduser().absolute()
    if path.is_dir() or (path.is_file() and path.suffix == ".model"):
        return path
    problem = "is not a .model file" if path.is_file() else "does not exist"
    raise UserError(f"data.tokenizer={name} {problem}; {_ALLOWED}")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
