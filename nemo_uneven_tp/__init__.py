"""Uneven tensor parallelism for NeMo: a GPT run that has lost a rank keeps training.

Importing this package imports neither torch nor NeMo; the names below load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_uneven_tp.nemo.recipe import apply
    from nemo_uneven_tp.plan import Plan
    from nemo_uneven_tp.planner import PlanRequest, make_plan

__version__ = "0.1.0"
__all__ = ["Plan", "PlanRequest", "__version__", "apply", "make_plan"]

_HOMES = {"apply": "nemo.recipe", "Plan": "plan", "PlanRequest": "planner", "make_plan": "planner"}


def __getattr__(name: str) -> Any:
    """Load a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
