"""Our lines on the terminal, everything else in ``train.log``.

NeMo, Megatron and their libraries write through loggers, warnings, ``print`` and from C++.
Redirecting the file descriptors catches all of it, so none of them has to be known by name.
Imports no torch: it is in place before the libraries that talk at import.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Console:
    """The terminal of the run, while :func:`noise_to` holds the process's own output."""

    def __init__(self, descriptor: int) -> None:
        self._stream: io.TextIOBase | None = os.fdopen(descriptor, "w", encoding="utf-8")

    def __deepcopy__(self, memo: dict[int, object]) -> Console:
        """The same: NeMo's trainer copies its callbacks, and there is one terminal."""
        return self

    def line(self, text: str) -> None:
        """Print one line. A terminal that has gone does not stop the run."""
        if self._stream is None:
            return
        try:
            self._stream.write(f"{text}\n")
            self._stream.flush()
        except OSError:
            self._stream = None


@contextmanager
def noise_to(log_file: Path, level: str, rank: int) -> Iterator[Console]:
    """Append this process's stdout and stderr to ``log_file``; yields the terminal.

    All ranks share the file. Log messages from ``level`` on and Python warnings are written by
    rank 0; the others say much the same, so only their errors are. A crash in native code
    leaves a Python stack there too.
    """
    _flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    console = Console(os.dup(kept[0]))
    with log_file.open("ab", buffering=0) as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    faulthandler.enable()
    _set_levels(level, rank)
    try:
        yield console
    finally:
        _flush()
        for descriptor, original in zip((1, 2), kept, strict=True):
            os.dup2(original, descriptor)
            os.close(original)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _set_levels(level: str, rank: int) -> None:
    lowest = logging.getLevelNamesMapping()[level]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # or lines of the ranks mix
    logging.basicConfig(
        level=lowest, format=f"%(asctime)s rank {rank} %(name)s %(levelname)s: %(message)s"
    )
    if rank:
        lowest = max(lowest, logging.ERROR)
        warnings.simplefilter("ignore")
    # Lightning and NeMo give their loggers levels of their own, which the root's doesn't change.
    logging.disable(lowest - 1)
