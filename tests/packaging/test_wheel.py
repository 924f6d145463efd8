"""The wheel in a clean environment, and the plugin in other people's Hydra apps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
APP = """
import hydra

@hydra.main(config_path=None, version_base="1.3")
def app(config):
    print(config.uneven_tp.enabled, list(config.uneven_tp.failed_ranks))

app()
"""
ENABLED = ["+uneven_tp=on", "uneven_tp.failed_ranks=[3]"]

pytestmark = pytest.mark.timeout(240)


def run(command: list[str | Path], folder: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # Built from a copy: setuptools writes build/ and *.egg-info beside the sources.
    source = folder / "source"
    source.mkdir()
    for name in ("nemo_uneven_tp", "hydra_plugins", "conf", "recipes"):
        subprocess.run(["cp", "-r", REPOSITORY / name, source / name], check=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((REPOSITORY / name).read_bytes())
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder], source)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def clean_bin(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin/`` of an environment that holds the wheel and its base dependencies only."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True)
    constraints = REPOSITORY / "constraints" / "cpu.txt"
    run([folder / "bin" / "pip", "install", "-q", "-c", constraints, wheel], folder)
    return folder / "bin"


def test_configurations_travel_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("conf", "recipes"):
        for file in (REPOSITORY / folder).rglob("*.yaml"):
            assert f"nemo_uneven_tp/{file.relative_to(REPOSITORY)}" in names
    assert "nemo_uneven_tp/py.typed" in names
    assert not any(name.startswith(("conf/", "recipes/", "tests/")) for name in names)


def test_every_package_is_listed() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    modules = (REPOSITORY / "nemo_uneven_tp").rglob("*.py")
    found = {".".join(module.parent.relative_to(REPOSITORY).parts) for module in modules}
    assert set(project["tool"]["setuptools"]["packages"]) == found | {
        "hydra_plugins",
        "hydra_plugins.nemo_uneven_tp",
        "nemo_uneven_tp.conf",
        "nemo_uneven_tp.recipes",
    }


def test_a_clean_install_plans_without_torch(clean_bin: Path, tmp_path: Path) -> None:
    installed = {
        package["name"].lower().replace("-", "_")
        for package in json.loads(run([clean_bin / "pip", "list", "--format=json"], tmp_path))
    }
    assert not installed & {"torch", "megatron_core", "nemo_toolkit", "transformer_engine", "numpy"}
    out = run([clean_bin / "uneven-tp", "plan", "uneven_tp.failed_ranks=[3]"], tmp_path)
    assert "3 of 4 ranks" in out
    out = run([clean_bin / "uneven-tp", "plan", "--config-name", "gpt3_126m"], tmp_path)
    assert "TP4 x DP2" in out
    command = ["-m", "nemo_uneven_tp", "pretrain", "--config-name", "nemo_recipe", "--cfg", "job"]
    assert "overrides: {}" in run([clean_bin / "python", *command], tmp_path)


def test_a_run_without_the_packages_is_refused(clean_bin: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [clean_bin / "uneven-tp", "pretrain"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "torch is missing; these work together" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_plugin_serves_any_hydra_app(clean_bin: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    out = run([clean_bin / "python", "app.py", *ENABLED, "hydra.run.dir=."], tmp_path)
    assert out == "True [3]\n"


def test_the_plugin_serves_apps_beside_this_install(tmp_path: Path) -> None:
    """In the environment of the tests, which is an editable install."""
    (tmp_path / "app.py").write_text(APP)
    out = run([sys.executable, "app.py", *ENABLED, "hydra.run.dir=."], tmp_path)
    assert out == "True [3]\n"
