"""What a recipe may not ask for together with uneven tensor parallelism.

The one list of refusals for recipes: an entry goes when its feature is there. Everything not
listed stays as the recipe has it, the distributed optimizer included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import fiddle as fdl

from nemo_uneven_tp.errors import UnsupportedError
from nemo_uneven_tp.nemo.recipe_tree import class_of, value_at

_NO_FIX = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A field whose value is not supported; ``fix`` is the value to set, if one helps."""

    path: str
    value: Any
    feature: str
    fix: Any = _NO_FIX

    def __str__(self) -> str:
        shown = value_name(self.value)
        advice = "" if self.fix is _NO_FIX else f"; set it to {value_name(self.fix)}"
        return f"{self.path}={shown} ({self.feature}{advice})"


def check_supported(recipe: fdl.Buildable) -> None:
    """Refuse a recipe that asks for unsupported features, all of them in one sentence.

    Raises:
        UnsupportedError: naming each field, its value and what to set.
    """
    found = list(refusals(recipe))
    if not found:
        return
    what = ", ".join(map(str, found))
    fixes = [r for r in found if r.fix is not _NO_FIX]
    if len(fixes) < len(found):
        advice = "choose another recipe or use uneven_tp=off"
    else:
        flags = " ".join(f"++recipe.overrides.{r.path}={_in_hydra(r.fix)}" for r in fixes)
        advice = f"on the command line add {flags}"
    raise UnsupportedError(
        f"the recipe asks for what uneven_tp does not support yet: {what}; {advice}"
    )


def refusals(recipe: fdl.Buildable) -> Iterator[Refusal]:
    """Everything in the recipe's tree that is not supported."""
    yield from _of_model_kind(recipe)
    for path, (wrong, feature, fix) in _FIELDS.items():
        value = value_at(recipe, path)
        if wrong(value):
            yield Refusal(path=path, value=value, feature=feature, fix=fix)
    yield from _of_lists(recipe)
    optim = value_at(recipe, "optim")
    if optim is not None and not _is_megatron_optimizer(optim):
        yield Refusal(path="optim", value=optim, feature="an optimizer other than Megatron's")


def value_name(value: Any) -> str:
    """A value as a user would write it: classes and functions by name."""
    if isinstance(value, fdl.Buildable):
        return str(class_of(value).__name__)
    return str(getattr(value, "__name__", value))


def _not_one(value: Any) -> bool:
    return value not in (None, 1)


def _more_than_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _set(value: Any) -> bool:
    return value not in (None, False, 0, "", "none")


_STRATEGY, _CONFIG = "trainer.strategy", "model.config"
_FIELDS: dict[str, tuple[Callable[[Any], bool], str, Any]] = {
    f"{_STRATEGY}.pipeline_model_parallel_size": (_not_one, "pipeline parallelism", 1),
    f"{_STRATEGY}.virtual_pipeline_model_parallel_size": (
        _set,
        "virtual pipeline parallelism",
        None,
    ),
    f"{_STRATEGY}.context_parallel_size": (_not_one, "context parallelism", 1),
    f"{_STRATEGY}.expert_model_parallel_size": (_not_one, "expert parallelism", 1),
    f"{_STRATEGY}.expert_tensor_parallel_size": (_more_than_one, "expert parallelism", None),
    f"{_STRATEGY}.encoder_tensor_model_parallel_size": (_set, "an encoder", 0),
    f"{_STRATEGY}.encoder_pipeline_model_parallel_size": (_set, "an encoder", 0),
    f"{_STRATEGY}.num_distributed_optimizer_instances": (
        _not_one,
        "several distributed optimizer instances",
        1,
    ),
    f"{_STRATEGY}.fsdp": (_set, "FSDP", None),
    f"{_STRATEGY}.ddp.use_megatron_fsdp": (_set, "FSDP", False),
    f"{_STRATEGY}.ddp.use_custom_fsdp": (_set, "FSDP", False),
    f"{_STRATEGY}.ddp": (lambda value: value == "pytorch", "PyTorch's DDP", "megatron"),
    f"{_CONFIG}.num_moe_experts": (_set, "mixture of experts", _NO_FIX),
    f"{_CONFIG}.multi_latent_attention": (_set, "multi-latent attention", _NO_FIX),
    f"{_CONFIG}.mtp_num_layers": (_set, "multi-token prediction", None),
    f"{_CONFIG}.heterogeneous_block_specs": (_set, "a mix of layer kinds", _NO_FIX),
    f"{_CONFIG}.position_embedding_type": (
        lambda value: value not in (None, "learned_absolute", "rope"),
        "this kind of position embedding",
        _NO_FIX,
    ),
    f"{_CONFIG}.use_transformer_engine_full_layer_spec": (
        _set,
        "Transformer Engine's whole layers",
        False,
    ),
    f"{_CONFIG}.fp8": (_set, "FP8", None),
    f"{_CONFIG}.fp8_param": (_set, "FP8 parameters", False),
    f"{_CONFIG}.fp4": (_set, "FP4", None),
    f"{_CONFIG}.cpu_offloading": (_set, "CPU offloading", False),
    f"{_CONFIG}.enable_cuda_graph": (_set, "CUDA graphs", False),
    f"{_CONFIG}.external_cuda_graph": (_set, "CUDA graphs", False),
    f"{_CONFIG}.cuda_graph_impl": (_set, "CUDA graphs", "none"),
    f"{_CONFIG}.tp_comm_overlap": (_set, "overlap of tensor-parallel communication", False),
    "optim.config.optimizer_cpu_offload": (_set, "CPU offloading", False),
}
"""Field: is the value wrong, the feature in words, the value that turns it off."""

_IN_LISTS: dict[str, dict[str, tuple[str, Any]]] = {
    "trainer.plugins": {
        "fp8": ("FP8", None),
        "fp8_params": ("FP8 parameters", False),
        "fp8_param_gather": ("FP8 parameters", False),
    },
    "trainer.callbacks": {"tp_comm_overlap": ("overlap of tensor-parallel communication", False)},
}
"""The same for fields of plugins and callbacks."""

_CONFIGURE_MODEL_OWNERS = {"GPTConfig", "Llama31Config"}
"""Classes whose ``configure_model`` makes Megatron's plain ``GPTModel`` (one scales RoPE)."""


def _of_model_kind(recipe: fdl.Buildable) -> Iterator[Refusal]:
    """Models that are no dense GPT of plain layers."""
    from nemo.collections.llm import GPTConfig
    from nemo.collections.llm.gpt.model import base

    model = value_at(recipe, "model")
    config = value_at(recipe, _CONFIG)
    kind = class_of(config)
    if config is None or not (isinstance(kind, type) and issubclass(kind, GPTConfig)):
        yield Refusal(path="model", value=model, feature="a model that is no GPT")
        return
    owner = next(c for c in kind.__mro__ if "configure_model" in vars(c))
    if owner.__name__ not in _CONFIGURE_MODEL_OWNERS and owner.__module__.startswith("nemo."):
        yield Refusal(path=_CONFIG, value=config, feature="a GPT of special layers")
        return
    spec = value_at(recipe, f"{_CONFIG}.transformer_layer_spec")
    module = getattr(spec, "__module__", "") or ""
    if callable(spec) and module.startswith("nemo.collections.llm") and module != base.__name__:
        path = f"{_CONFIG}.transformer_layer_spec"
        yield Refusal(path=path, value=spec, feature="a GPT of special layers")


def _of_lists(recipe: fdl.Buildable) -> Iterator[Refusal]:
    for path, fields in _IN_LISTS.items():
        items = value_at(recipe, path)
        listed = isinstance(items, (list, tuple))
        for i, item in enumerate(items if listed else [items]):
            where = f"{path}.{i}" if listed else path
            for name, (feature, fix) in fields.items():
                value = value_at(item, name)
                if _set(value):
                    yield Refusal(path=f"{where}.{name}", value=value, feature=feature, fix=fix)


def _is_megatron_optimizer(node: Any) -> bool:
    from nemo.lightning import MegatronOptimizerModule

    kind = class_of(node)
    return isinstance(kind, type) and issubclass(kind, MegatronOptimizerModule)


def _in_hydra(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
