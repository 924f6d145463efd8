"""Which dotted keys a configuration knows, and what a misspelt one was meant to be."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from difflib import SequenceMatcher
from typing import Any, get_type_hints

from nemo_uneven_tp.config import passthrough
from nemo_uneven_tp.config.schema import RecipeRunConfig, RunConfig

RECIPE_HINT = (
    "with --config-name nemo_recipe, fields of the recipe are set with ++recipe.overrides.FIELD=..."
)
_CLOSE_ENOUGH = 0.75


def groups(schema: type) -> dict[str, type]:
    """The config groups of a run schema: name and dataclass."""
    hints = get_type_hints(schema)
    return {f.name: hints[f.name] for f in fields(schema) if is_dataclass(hints[f.name])}


def known_keys(schema: type) -> list[str]:
    """Every dotted key of a run schema."""
    found = [f.name for f in fields(schema)]
    for name, group in groups(schema).items():
        found += [f"{name}.{f.name}" for f in fields(group)]
    return found


def type_of(key: str, schema: type) -> Any:
    """The annotation of a dotted key; ``Any`` for one that the schema does not have."""
    group, _, name = key.rpartition(".")
    owner = groups(schema).get(group) if group else schema
    return get_type_hints(owner).get(name, Any) if owner else Any


def is_known(key: str, schema: type) -> bool:
    """Whether the schema has the key, or holds free-form data there (``recipe.args.X``)."""
    free_form = schema is RecipeRunConfig and key.startswith(("recipe.args.", "recipe.overrides."))
    return free_form or key in known_keys(schema)


def nearest(key: str, schema: type) -> str | None:
    """The key that ``key`` was most likely meant to be, with ``+`` if it has to be added."""
    leaf = key.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        whole = SequenceMatcher(None, key, candidate).ratio()
        return max(whole, SequenceMatcher(None, leaf, candidate.rpartition(".")[2]).ratio() - 0.01)

    candidates = known_keys(schema)
    if schema is RunConfig:
        for group, names in passthrough.FIELDS.items():
            candidates += sorted({f"{group}.{name}" for name in names} - set(candidates))
    best = max(candidates, key=likeness)
    if likeness(best) < _CLOSE_ENOUGH:
        return None
    return best if is_known(best, schema) else f"+{best}"


def unknown_key(key: str, schema: type) -> str:
    """One sentence about a key that is not ours, with the closest one that is."""
    group, _, name = key.partition(".")
    if schema is RunConfig and name in passthrough.FIELDS.get(group, ()):
        return (
            f"{key} is a field of {passthrough.OWNERS[group]} that this configuration does not "
            f"set; add it with +{key}=..."
        )
    if schema is RunConfig and group == "recipe":
        return f"{key} is a key of --config-name nemo_recipe only; add that"
    suggestion = nearest(key, schema)
    owner = passthrough.OWNERS.get(group) if schema is RunConfig else None
    what = f"is neither a key of the configuration nor a field of {owner}" if owner else None
    sentence = f"{key} {what or 'is not a key of the configuration'}"
    if suggestion:
        return f"{sentence}; did you mean {suggestion}?"
    if schema is RecipeRunConfig:
        return f"{sentence}; {RECIPE_HINT}"
    return f"{sentence}; uneven-tp pretrain --cfg job lists the keys"


def shown(value: Any) -> str:
    """A value as YAML has it: ``null``, ``true``."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def type_in_words(annotation: Any) -> str:
    """``int`` -> ``an integer`` and so on, for messages."""
    text = str(annotation)
    names = {"bool": "true or false", "int": "an integer", "float": "a number", "str": "text"}
    if isinstance(annotation, type) and annotation.__name__ in names:
        return names[annotation.__name__]
    for name, words in names.items():
        if text.startswith(f"{name} |"):
            return f"{words} or null"
    if "list" in text:
        return "a list such as [2, 1]" if "None" not in text else "a list such as [2, 1] or null"
    if annotation is Any:
        return "one value or a list"
    return "a mapping" if "dict" in text else text
