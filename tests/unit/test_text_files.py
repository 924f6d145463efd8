"""Which text is read, how it is cut, and every kind of text that is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_uneven_tp import text_files
from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.text_files import check_split, check_text, documents, fingerprint
from nemo_uneven_tp.text_files import resolve_text_files as resolve


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with text, empty and hidden files at several depths."""
    for name, text in {
        "b.txt": "b\n",
        "a.txt": "a\n",
        "deep/er/c.md": "c\n",
        "deep/empty.txt": "",
        ".hidden/d.txt": "d\n",
        ".e.txt": "e\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(files: list[Path], below: Path) -> list[str]:
    return [str(file.relative_to(below)) for file in files]


def test_folder_is_read_recursively_in_sorted_order_without_empty_and_hidden_files(
    corpus: Path,
) -> None:
    assert names(resolve(str(corpus)), corpus) == ["a.txt", "b.txt", "deep/er/c.md"]


def test_arguments_keep_their_order_and_each_file_counts_once(corpus: Path) -> None:
    found = resolve([f"{corpus}/deep", f"{corpus}/b.txt", f"{corpus}/*.txt"])
    assert names(found, corpus) == ["deep/er/c.md", "b.txt", "a.txt"]


def test_recursive_glob(corpus: Path) -> None:
    assert names(resolve(f"{corpus}/**/*.md"), corpus) == ["deep/er/c.md"]


def test_relative_and_home_paths_become_absolute(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus)
    monkeypatch.setenv("HOME", str(corpus))
    assert resolve(["a.txt", "~/b.txt"]) == [corpus / "a.txt", corpus / "b.txt"]


def test_a_file_name_with_glob_characters_is_a_file(tmp_path: Path) -> None:
    file = tmp_path / "part[1].txt"
    file.write_text("text\n")
    assert resolve(str(file)) == [file]


def test_default_is_the_standard_library_without_tests_and_packages() -> None:
    files = resolve(None)
    assert len(files) > 300
    assert all(file.suffix == ".py" for file in files)
    assert not any({"site-packages", "test", "tests"} & set(file.parts) for file in files)
    assert any(file.name == "argparse.py" for file in files)


def refused(paths: str | list[str]) -> str:
    with pytest.raises(UserError) as caught:
        resolve(paths)
    message = str(caught.value)
    assert message.startswith("data.paths")
    assert "\n" not in message
    return message


def test_missing_file(corpus: Path) -> None:
    message = refused([f"{corpus}/a.txt", f"{corpus}/nothing.txt"])
    assert "nothing.txt does not exist" in message


def test_no_paths_at_all() -> None:
    assert "names no text" in refused([])


def test_empty_file(corpus: Path) -> None:
    assert "empty.txt is empty" in refused(f"{corpus}/deep/empty.txt")


@pytest.mark.parametrize("named", ["{}/nothing*.txt", "{}/bare", "{}/deep/empty*"])
def test_folder_or_glob_without_text(corpus: Path, named: str) -> None:
    (corpus / "bare").mkdir()
    assert "holds no text" in refused(named.format(corpus))


@pytest.mark.parametrize(
    "content", [b"text\0text", b"\xff\xfe\x00", "latin é".encode("latin-1"), b"x" * 70000 + b"\0"]
)
def test_binary_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"data\.paths: .*data\.bin is not UTF-8 text"):
        list(documents(resolve(str(tmp_path))))


def test_text_may_be_cut_inside_a_character_where_the_check_ends(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 65535 + "é" + "x" * 10, encoding="utf-8")
    assert len(resolve(str(tmp_path))) == 1


def test_dangling_link_and_special_file(tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    assert "cannot read" in refused(f"{tmp_path}/link.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    assert "not a regular file" in refused(f"{tmp_path}/pipe.txt")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter (pytest's own is private)."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_unreadable(open_folder: Path, what: str) -> None:
    folder = open_folder / "folder"
    folder.mkdir()
    (folder / "secret.txt").write_text("text\n")
    (folder / "secret.txt" if what == "file" else folder).chmod(0)
    was = os.geteuid()
    try:
        if was == 0:  # root may read everything
            os.seteuid(65534)
        assert "cannot read" in refused(str(folder))
    finally:
        os.seteuid(was)
        folder.chmod(0o755)


def test_fingerprint_changes_with_any_write(corpus: Path) -> None:
    before = fingerprint(resolve(str(corpus)))
    assert fingerprint(resolve(str(corpus))) == before
    file = corpus / "a.txt"
    times = file.stat()
    file.write_text("A\n")  # same size, and the old modification time comes back
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = fingerprint(resolve(str(corpus)))
    assert changed != before
    assert fingerprint(list(reversed(resolve(str(corpus))))) != changed


def test_documents_give_the_text_back_and_cut_long_files_at_line_ends(tmp_path: Path) -> None:
    text = "".join(f"line {i} é\r\n" for i in range(5000))
    (tmp_path / "one.txt").write_text(text, encoding="utf-8", newline="")
    cut = list(documents(resolve(str(tmp_path))))
    assert "".join(cut) == text
    assert 100 < len(cut) <= 256
    assert all(piece.endswith("\n") for piece in cut)


def test_documents_are_cut_where_there_are_no_line_ends(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("x" * 100_000)
    cut = list(documents(resolve(str(tmp_path))))
    assert sum(map(len, cut)) == 100_000
    assert len(cut) > 100


def test_a_small_file_among_many_is_one_document(corpus: Path) -> None:
    assert list(documents(resolve(str(corpus)))) == ["a\n", "b\n", "c\n"]


def test_one_short_file_is_enough_for_a_split(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("some words of mine\n" * 1000)
    assert check_text(str(tmp_path), "byte", "900,50,50", 256, limit_val_batches=2)


@pytest.mark.parametrize(
    ("lengths", "split", "seq_length", "part"),
    [
        ([100] * 5, "900,50,50", 16, "test gets 0 of 500"),  # would hang Megatron
        ([100] * 20, "90,5,5", 128, "validation gets 100 of 2000"),
        ([10], "1,0,0", 16, "train gets 10 of 10"),
    ],
)
def test_too_little_text(lengths: list[int], split: str, seq_length: int, part: str) -> None:
    with pytest.raises(UserError, match=f"data.paths holds too little text: {part}"):
        check_split(lengths, split, seq_length)


def test_enough_text_just_so() -> None:
    check_split([17] * 3, "1,1,1", 16)
    check_split([17], "1,0,0", 16)


def test_validation_needs_a_part() -> None:
    with pytest.raises(UserError, match=r"trainer\.limit_val_batches=2 needs text"):
        check_split([1000], "1,0,0", 16, limit_val_batches=2)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "0,1,1", "-1,2,3"])
def test_bad_split(split: str) -> None:
    with pytest.raises(UserError, match=r"data\.split="):
        text_files.split_weights(split)


def test_needs_neither_torch_nor_nemo() -> None:
    code = (
        "import sys; from nemo_uneven_tp.text_files import check_text;"
        "check_text(None, 'byte', '900,50,50', 256);"
        "assert not {'torch', 'nemo', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
