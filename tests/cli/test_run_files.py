"""The run folder: created once, read back, waited for."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from nemo_uneven_tp.config.compose import compose
from nemo_uneven_tp.config.request import plan_of
from nemo_uneven_tp.config.validate import Config, checked
from nemo_uneven_tp.errors import UnevenTPError, UserError
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.run_files import CONFIG_FILE, PLAN_FILE, create, read, refuse_used, wait_for


def run(*overrides: str) -> tuple[Config, Plan]:
    composed = compose("uneven-tp plan", ["run_dir=r", *overrides])
    assert composed is not None
    config = checked(composed)
    return config, plan_of(config)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    config, plan = run("uneven_tp.failed_ranks=[3]", "+model.window_size=[8,0]")
    create(tmp_path / "a" / "b", config, plan)
    assert sorted(f.name for f in (tmp_path / "a" / "b").iterdir()) == [CONFIG_FILE, PLAN_FILE]
    assert read(tmp_path / "a" / "b") == (config, plan)


def test_a_folder_is_used_once(tmp_path: Path) -> None:
    refuse_used(tmp_path)
    create(tmp_path, *run())
    with pytest.raises(UserError, match="holds another run"):
        refuse_used(tmp_path)
    with pytest.raises(UserError, match="holds another run"):
        create(tmp_path, *run())


def test_refusing_writes_nothing(tmp_path: Path) -> None:
    refuse_used(tmp_path / "new" / "er")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no complete run"):
        read(tmp_path)
    create(tmp_path, *run())
    (tmp_path / CONFIG_FILE).write_text("a: [")
    with pytest.raises(UserError, match="no complete run"):
        read(tmp_path)
    (tmp_path / CONFIG_FILE).write_text("[1]")
    with pytest.raises(UserError, match="not a mapping"):
        read(tmp_path)


def test_other_processes_wait_for_the_first(tmp_path: Path) -> None:
    config, plan = run()
    timer = threading.Timer(0.3, create, (tmp_path / "r", config, plan))
    timer.start()
    wait_for(tmp_path / "r", plan, timeout_s=10)
    timer.join()
    assert (tmp_path / "r" / CONFIG_FILE).exists()


def test_waiting_ends(tmp_path: Path) -> None:
    with pytest.raises(UnevenTPError, match="not created"):
        wait_for(tmp_path / "r", run()[1], timeout_s=0.2)


def test_processes_with_different_overrides_are_told(tmp_path: Path) -> None:
    create(tmp_path, *run())
    with pytest.raises(UserError, match="another plan"):
        wait_for(tmp_path, run("uneven_tp.failed_ranks=[3]")[1], timeout_s=1)
