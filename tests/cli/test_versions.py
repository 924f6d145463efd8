"""Missing packages and versions that don't work together."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import pytest

from nemo_uneven_tp import versions
from nemo_uneven_tp.errors import UserError

GOOD = {
    "torch": "2.13.0+cpu",
    "megatron-core": "0.15.3",
    "nemo_toolkit": "2.7.3",
    "nemo_run": "0.11.1",
    "lightning": "2.4.0",
}


def reader(**changes: str | None) -> Callable[[str], str]:
    found = {**GOOD, **{name.replace("megatron_", "megatron-"): v for name, v in changes.items()}}

    def read(name: str) -> str:
        version = found[name]
        if version is None:
            raise PackageNotFoundError(name)
        return version

    return read


def test_versions_that_work() -> None:
    versions.check_versions(reader())
    versions.check_versions(reader(torch="2.9.0a0+50eac811a6.nv25.09", megatron_core="0.15.0rc7"))


def test_this_environment_works() -> None:
    pytest.importorskip("torch")
    versions.check_versions()


@pytest.mark.parametrize(
    ("package", "found"),
    [
        ("megatron_core", "0.14.0"),
        ("megatron_core", "1.0"),
        ("nemo_toolkit", "3.0.0"),
        ("nemo_toolkit", "2.5.1"),
        ("torch", "2.5.1"),
    ],
)
def test_versions_that_do_not(package: str, found: str) -> None:
    with pytest.raises(UserError) as caught:
        versions.check_versions(reader(**{package: found}))
    assert f"{package.replace('megatron_', 'megatron-')} {found}" in str(caught.value)
    assert "nemo_toolkit 2.7, megatron-core 0.15" in str(caught.value)


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="nemo_toolkit is missing; these work together"):
        versions.check_versions(reader(nemo_toolkit=None))


def test_a_source_tree_without_metadata_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_spec", lambda name: object())
    versions.check_versions(reader(megatron_core=None))
