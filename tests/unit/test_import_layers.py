"""The rule of the house: pure, then torch and Megatron, then NeMo and Hydra."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "nemo_uneven_tp"
PURE = "errors shares model_shape plan topology planner batch ranks text_files versions events "
PURE += "costs layout_options speeds processes "
PURE += "job_events goodput/timeline goodput/reading goodput/books goodput/run goodput/compare"
PURE += " supervise/policy"
NEMO = {"nemo", "nemo_run", "fiddle", "lightning", "hydra", "omegaconf"}
HEAVY = NEMO | {"torch", "megatron"}
AROUND = {
    "nemo",
    "cli",
    "config",
    "run_files.py",
    "worker.py",
    "launch.py",
    "__init__.py",
    "__main__.py",
}


def imports(path: Path, everywhere: bool) -> set[str]:
    """Top-level packages that a module imports (``everywhere``: in functions too)."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
            if node.module.startswith("nemo_uneven_tp.nemo"):
                found.add("nemo")
    return found


@pytest.mark.parametrize("name", PURE.split())
def test_pure_modules_import_nothing_heavy(name: str) -> None:
    assert not imports(PACKAGE / f"{name}.py", everywhere=True) & HEAVY


@pytest.mark.parametrize(
    "path",
    [p for p in sorted(PACKAGE.rglob("*.py")) if p.relative_to(PACKAGE).parts[0] not in AROUND],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_the_core_does_not_import_nemo_or_hydra(path: Path) -> None:
    assert not imports(path, everywhere=True) & NEMO


@pytest.mark.parametrize("path", sorted((PACKAGE / "cli").glob("*.py")), ids=lambda p: p.name)
def test_the_command_line_starts_light(path: Path) -> None:
    assert not imports(path, everywhere=False) & (HEAVY - {"hydra", "omegaconf"})
