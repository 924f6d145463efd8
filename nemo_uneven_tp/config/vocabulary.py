"""How many token ids a tokenizer has, without importing torch or NeMo."""

from __future__ import annotations

import json
from pathlib import Path

from nemo_uneven_tp.errors import UserError

BYTE_TOKENIZER = "byte"
BYTE_VOCAB_SIZE = 512
"""``vocab_size`` of NeMo's ``ByteLevelTokenizer``: 256 bytes, the rest reserved."""

_ALLOWED = "give 'byte', a SentencePiece .model file or a folder with a Hugging Face tokenizer"


def tokenizer_vocab_size(tokenizer: str) -> int:
    """Token ids of ``data.tokenizer``, before Megatron pads them.

    Raises:
        UserError: if it is none of the three kinds, or can't be read.
    """
    if tokenizer == BYTE_TOKENIZER:
        return BYTE_VOCAB_SIZE
    path = Path(tokenizer).expanduser()
    try:
        if path.is_file() and path.suffix == ".model":
            from sentencepiece import SentencePieceProcessor

            return int(SentencePieceProcessor(model_file=str(path)).get_piece_size())
        if path.is_dir():
            return _size_of_folder(path)
    except ImportError as error:
        raise UserError(
            f"data.tokenizer={tokenizer} needs the package {error.name}; install it"
        ) from error
    except Exception as error:  # the libraries raise many kinds for a bad file
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"data.tokenizer={tokenizer} can't be loaded ({reason}); {_ALLOWED}"
        ) from error
    problem = "is not a .model file" if path.is_file() else "does not exist"
    raise UserError(f"data.tokenizer={tokenizer} {problem}; {_ALLOWED}")


def _size_of_folder(folder: Path) -> int:
    file = folder / "tokenizer.json"
    if file.is_file():
        content = json.loads(file.read_text(encoding="utf-8"))
        vocab = content.get("model", {}).get("vocab")
        added = {token["content"] for token in content.get("added_tokens", ())}
        if isinstance(vocab, dict):  # BPE, WordPiece, WordLevel: {token: id}
            return len(set(vocab) | added)
        if isinstance(vocab, list):  # Unigram: [[token, score], ...]
            return len({token for token, _score in vocab} | added)
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
