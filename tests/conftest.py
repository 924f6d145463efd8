"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_uneven_tp.cli.main import main


@dataclass(frozen=True)
class Outcome:
    """What a command returned and printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def uneven_tp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    """Run ``uneven-tp ARGUMENTS`` in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Outcome:
        code = main(arguments)
        captured = capsys.readouterr()
        return Outcome(code=code, out=captured.out, err=captured.err)

    return run
