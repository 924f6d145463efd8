"""NeMo recipes by name, and changes to the fiddle tree they are.

A recipe is what a ``pretrain_recipe`` of ``nemo.collections.llm.recipes`` returns: a
``run.Partial`` of ``llm.pretrain`` whose arguments are ``run.Config`` nodes. Building the tree
builds no model and needs neither GPUs nor a network.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import fiddle as fdl
import nemo_run as run
import torch

from nemo_uneven_tp.errors import UserError

RECIPES = "nemo.collections.llm.recipes"
FACTORY = "pretrain_recipe"
TARGET = "_target_"
_UNSET = object()


def build_recipe(
    name: str, args: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None
) -> run.Partial:
    """The recipe called ``name``, with ``overrides`` put into its tree.

    Args:
        name: a module of ``nemo.collections.llm.recipes`` (``llama3_8b``), or the import path of
            any function that returns a recipe (``my_package.my_module.my_recipe``).
        args: keyword arguments of the recipe's function.
        overrides: values nested as in the tree. A mapping with ``_target_`` (an import path)
            makes a new node; the items of a list go by their index.

    Raises:
        UserError: no such recipe, argument or field, each with the nearest name.
    """
    factory = _factory(name)
    known = inspect.signature(factory).parameters
    for key in args or {}:
        if key not in known:
            raise UserError(f"recipe.args.{key}: {name} has no such argument{_hint(key, known)}")
    try:
        recipe = factory(**(args or {}))
    except NotImplementedError as error:
        raise UserError(f"recipe.name={name} is not for pretraining ({error})") from error
    if not isinstance(recipe, fdl.Buildable) or value_at(recipe, "trainer") is None:
        raise UserError(
            f"recipe.name={name} returns no pretraining recipe (a run.Partial with a trainer)"
        )
    set_fields(recipe, overrides or {})
    return recipe


def set_fields(node: Any, values: Mapping[str, Any], path: str = "recipe.overrides") -> None:
    """Put ``values``, nested as in the tree, into ``node``, in place.

    Raises:
        UserError: a field that the node's class does not have, with the nearest name.
    """
    for key, value in values.items():
        here = f"{path}.{key}"
        if isinstance(node, list):
            index = _index(key, node, here)
            if _goes_deeper(value, node[index]):
                set_fields(node[index], value, here)
            else:
                node[index] = _made(value, here)
            continue
        known = fields_of(node)
        if key not in known:
            kind = class_of(node).__name__
            raise UserError(f"{here}: {kind} has no field {key!r}{_hint(str(key), known)}")
        current = value_at(node, key)
        if _goes_deeper(value, current):
            set_fields(current, value, here)
        else:
            setattr(node, key, _made(value, here))


def value_at(node: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path below ``node``: what is set there, or the class's default."""
    for name in path.split("."):
        try:
            node = getattr(node, name)
        except (AttributeError, ValueError):  # fiddle: no default, or one made by a function
            return default
    return node


def class_of(node: Any) -> Any:
    """The class or function that a node stands for (of a plain object, its class)."""
    return node.__fn_or_cls__ if isinstance(node, fdl.Buildable) else type(node)


def fields_of(node: fdl.Buildable) -> list[str]:
    """Arguments that the node's class or function takes by name."""
    parameters = inspect.signature(class_of(node)).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [*named, *(name for name in node.__arguments__ if name not in named)]


def _factory(name: str) -> Callable[..., Any]:
    """The function that makes the recipe."""
    if "." in name or ":" in name:
        return _imported(name.replace(":", "."), f"recipe.name={name}")
    modules = [m.name for m in pkgutil.iter_modules(importlib.import_module(RECIPES).__path__)]
    if name not in modules:
        raise UserError(
            f"recipe.name={name} is no module of {RECIPES}{_hint(name, modules)}, or give the "
            "import path of a function that returns a recipe"
        )
    factory = getattr(importlib.import_module(f"{RECIPES}.{name}"), FACTORY, None)
    if factory is None:
        raise UserError(
            f"recipe.name={name}: {RECIPES}.{name} has no {FACTORY}; choose one that has"
        )
    return factory


def _goes_deeper(value: Any, current: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and TARGET not in value
        and isinstance(current, (fdl.Buildable, list))
    )


def _made(value: Any, path: str) -> Any:
    """What to put into the tree for a value of a configuration."""
    if isinstance(value, Mapping):
        if TARGET not in value:
            return {key: _made(item, f"{path}.{key}") for key, item in value.items()}
        node = run.Config(_imported(value[TARGET], f"{path}.{TARGET}={value[TARGET]}"))
        set_fields(node, {key: item for key, item in value.items() if key != TARGET}, path)
        return node
    if isinstance(value, (list, tuple)):
        return [_made(item, f"{path}.{i}") for i, item in enumerate(value)]
    if isinstance(value, str) and value.startswith("torch."):
        dtype = getattr(torch, value.removeprefix("torch."), None)
        if isinstance(dtype, torch.dtype):
            return dtype
    return value


def _imported(path: str, key: str) -> Any:
    """The object at a dotted import path."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{key} cannot be imported ({error}); check the import path") from error


def _index(key: Any, items: list[Any], path: str) -> int:
    if str(key).isdecimal() and int(key) < len(items):
        return int(key)
    raise UserError(f"{path}: this is a list of {len(items)} items; give an index from 0 on")


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
