"""Building and caching token files by real processes: at once, killed, damaged, changed."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from filelock import FileLock

from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.nemo import indexed_text
from nemo_uneven_tp.nemo.indexed_text import ensure_indexed, read_manifest
from nemo_uneven_tp.text_files import resolve_text_files

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["megatron.core.datasets.indexed_dataset"])
_WAIT_S = 50.0


class ByteTokens:
    """Bytes as tokens; can be slow, and writes a line to ``log`` for each document."""

    vocab_size = 512
    eod = 0

    def __init__(self, log: Path | None = None, seconds_per_document: float = 0.0) -> None:
        self.log, self.seconds_per_document = log, seconds_per_document

    def text_to_ids(self, text: str) -> list[int]:
        if self.log is not None:
            with open(self.log, "a") as stream:
                stream.write(f"{os.getpid()}\n")
        time.sleep(self.seconds_per_document)
        return list(text.encode())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02}.txt").write_text(f"text {i} é\n" * (i + 1), encoding="utf-8")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def build(text: Path, cache: Path, tokens: ByteTokens | None = None, identity: str = "x") -> Path:
    files = resolve_text_files(str(text))
    return ensure_indexed(files, tokens or ByteTokens(), identity, cache, lock_timeout_s=_WAIT_S)


def contents(entry: Path) -> list[bytes]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(indexed_text.prefix_of(entry)))
    return [bytes(dataset[i].astype("uint8")) for i in range(len(dataset))]


def expected(text: Path) -> list[bytes]:
    return [file.read_bytes() + b"\0" for file in sorted(text.iterdir())]


def started(count: int, text: Path, cache: Path, tokens: ByteTokens) -> list[BaseProcess]:
    processes = [_CONTEXT.Process(target=build, args=(text, cache, tokens)) for _ in range(count)]
    for process in processes:
        process.start()
    return list(processes)


def entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_one_document_per_file_closed_by_eod(text: Path, cache: Path) -> None:
    entry = build(text, cache)
    assert contents(entry) == expected(text)
    manifest = read_manifest(entry)
    assert manifest is not None
    assert manifest.documents == 20
    assert manifest.tokens == sum(map(len, expected(text)))
    assert indexed_text.document_tokens(entry) == [len(d) for d in expected(text)]


def test_the_second_call_reads_the_cache(text: Path, cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    first = build(text, cache, ByteTokens(log))
    lines = log.read_text()
    assert build(text, cache, ByteTokens(log)) == first
    assert log.read_text() == lines


def test_default_cache_respects_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert indexed_text.default_cache_dir() == Path("/somewhere/nemo-uneven-tp/text")


def test_four_processes_at_once_build_once(text: Path, cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = started(4, text, cache, ByteTokens(log, 0.05))
    for process in processes:
        process.join(_WAIT_S)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(set(log.read_text().split())) == 1
    assert len(log.read_text().split()) == 20
    (entry,) = entries(cache)
    assert contents(entry) == expected(text)


def test_a_killed_build_leaves_nothing_to_be_used(text: Path, cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    (builder,) = started(1, text, cache, ByteTokens(log, 0.2))
    wait_for_lines(log, 5)
    waiters = started(2, text, cache, ByteTokens(log))
    builder.kill()
    for process in (builder, *waiters):
        process.join(_WAIT_S)
    assert [process.exitcode for process in (builder, *waiters)] == [-9, 0, 0]
    (entry,) = entries(cache)  # and no temporary folder
    assert contents(entry) == expected(text)


def test_leftovers_of_another_entry_go_only_when_nobody_builds_it(text: Path, cache: Path) -> None:
    cache.mkdir()
    for key in ("dead", "alive"):
        (cache / f"{key}.tmp-1").mkdir()
    with FileLock(cache / "alive.lock"):
        build(text, cache)
    assert not (cache / "dead.tmp-1").exists()
    assert (cache / "alive.tmp-1").exists()


def test_a_changed_source_is_another_entry(text: Path, cache: Path) -> None:
    before = build(text, cache)
    (text / "03.txt").write_text("changed\n")
    after = build(text, cache)
    assert after != before
    assert contents(after) == expected(text)
    (text / "new.txt").write_text("new\n")
    assert contents(build(text, cache)) == expected(text)


def test_a_source_that_changes_meanwhile_is_refused(text: Path, cache: Path) -> None:
    class Meddling(ByteTokens):
        def text_to_ids(self, content: str) -> list[int]:
            (text / "00.txt").write_text("changed under our feet\n")
            return super().text_to_ids(content)

    with pytest.raises(UserError, match=r"data\.paths: a file changed while"):
        build(text, cache, Meddling())
    assert entries(cache) == []


def test_another_tokenizer_is_another_entry(text: Path, cache: Path) -> None:
    assert build(text, cache, identity="a") != build(text, cache, identity="b")


@pytest.mark.parametrize("name", ["text.bin", "text.idx", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone", "empty"])
def test_a_damaged_entry_is_built_again(text: Path, cache: Path, name: str, damage: str) -> None:
    file = build(text, cache) / name
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[:-7])
    elif damage == "flipped":
        middle = len(content) // 2
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        file.write_bytes(b"")
    entry = build(text, cache)
    assert contents(entry) == expected(text)
    assert read_manifest(entry) is not None
    assert entries(cache) == [entry]


def test_the_wait_for_another_builder_is_bounded(text: Path, cache: Path) -> None:
    entry = build(text, cache)
    (entry / "text.bin").unlink()
    files = resolve_text_files(str(text))
    with (
        FileLock(entry.with_name(f"{entry.name}.lock")),
        pytest.raises(UserError, match=r"data\.cache_dir"),
    ):
        ensure_indexed(files, ByteTokens(), "x", cache, lock_timeout_s=0.3)


def test_binary_found_in_the_middle_leaves_nothing(text: Path, cache: Path) -> None:
    (text / "big.txt").write_bytes(b"x" * 100_000 + b"\0\xff")
    with pytest.raises(UserError, match="not UTF-8 text"):
        build(text, cache)
    assert entries(cache) == []


def test_a_cache_folder_that_cannot_be_made(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache_dir=.*cannot be used"):
        build(text, tmp_path / "file" / "cache")


def test_token_ids_outside_the_vocabulary_are_refused(text: Path, cache: Path) -> None:
    class Wrong(ByteTokens):
        eod = -1

    with pytest.raises(UserError, match=r"data\.tokenizer gives token id -1"):
        build(text, cache, Wrong())


def test_large_vocabularies_take_wider_tokens(text: Path, cache: Path) -> None:
    class Large(ByteTokens):
        vocab_size = 128_256
        eod = 128_001

    entry = build(text, cache, Large())
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(indexed_text.prefix_of(entry)))
    assert dataset[0][-1] == 128_001


def wait_for_lines(file: Path, count: int) -> None:
    """Wait until ``file`` has ``count`` lines."""
    end = time.monotonic() + _WAIT_S
    while not file.exists() or len(file.read_text().split()) < count:
        assert time.monotonic() < end
        time.sleep(0.02)
