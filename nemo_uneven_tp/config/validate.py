"""Composed configuration -> plain, typed, checked data.

:func:`checked` refuses unknown keys, wrong types, missing values and unsupported features,
each with one sentence. What ranks, degrees, batch and shape have to do with each other is
the planner's to check.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_uneven_tp.config import passthrough
from nemo_uneven_tp.config.keys import groups, shown, type_in_words, unknown_key
from nemo_uneven_tp.config.schema import CHOICES, RecipeRunConfig, RunConfig
from nemo_uneven_tp.errors import UnsupportedError, UserError
from nemo_uneven_tp.text_files import split_weights

Config = dict[str, Any]
"""A checked configuration: plain data, ``config["model"]["num_layers"]``."""

_MINIMUM = {
    "seed": 1,
    "trainer.max_steps": 1,
    "trainer.devices": 1,
    "trainer.num_nodes": 1,
    "trainer.val_check_interval": 1,
    "trainer.limit_val_batches": 0,
    "data.num_workers": 0,
    "data.seed": 0,
    "optim.lr": 0,
    "optim.min_lr": 0,
    "optim.warmup_steps": 0,
    "optim.constant_steps": 0,
    "optim.clip_grad": 0,
    "strategy.bucket_size": 1,
    "uneven_tp.check_replicas_every": 0,
    "checkpoint.every_n_steps": 1,
    "checkpoint.keep": 1,
    "launcher.timeout_s": 1,
    "launcher.threads_per_rank": 1,
}
_NULL = {
    "checkpoint.every_n_steps": "null, which saves nothing",
    "checkpoint.keep": "null, which keeps all",
}
"""What ``null`` means for keys of ``_MINIMUM`` where that is worth a word."""
_ABOVE_ZERO = (
    "model.layernorm_epsilon",
    "model.init_method_std",
    "model.rotary_base",
    "model.rotary_percent",
    "optim.adam_eps",
)
_BELOW_ONE = (
    "model.hidden_dropout",
    "model.attention_dropout",
    "optim.adam_beta1",
    "optim.adam_beta2",
)
_UNSUPPORTED = {
    "model.num_moe_experts": "mixture of experts",
    "model.multi_latent_attention": "multi-latent attention",
    "model.mtp_num_layers": "multi-token prediction",
    "model.heterogeneous_block_specs": "a mix of layer kinds",
    "model.cpu_offloading": "CPU offloading",
    "model.fp8": "FP8",
    "model.fp4": "FP4",
    "model.enable_cuda_graph": "CUDA graphs",
    "strategy.fsdp": "FSDP",
    "strategy.use_megatron_fsdp": "FSDP",
    "strategy.use_custom_fsdp": "FSDP",
    "strategy.virtual_pipeline_model_parallel_size": "virtual pipeline parallelism",
    "strategy.encoder_tensor_model_parallel_size": "an encoder",
    "strategy.encoder_pipeline_model_parallel_size": "an encoder",
    "optim.optimizer_cpu_offload": "CPU offloading",
}
_ONLY_ONE = {
    "strategy.context_parallel_size": "context parallelism",
    "strategy.expert_model_parallel_size": "expert parallelism",
    "strategy.expert_tensor_parallel_size": "expert parallelism",
}


def checked(composed: DictConfig) -> Config:
    """Check a composed configuration and return it as plain data, interpolations resolved.

    Raises:
        UserError: naming the key, its value, what is allowed and what to do.
    """
    for key in _missing("", OmegaConf.to_container(composed, resolve=False)):
        raise UserError(f"{key} has no value; set {key}=...")
    try:
        data = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        what = " ".join(line.strip() for line in str(error).splitlines()[:1])
        raise UserError(
            f"{error.full_key or 'the configuration'} can't be resolved: {what}"
        ) from error
    assert isinstance(data, dict)
    schema = RecipeRunConfig if "recipe" in data else RunConfig
    config = _typed(schema, {str(key): value for key, value in data.items()})
    _check_values(config)
    _check_features(config)
    return config


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, ``None`` if it is not there."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _missing(prefix: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _missing(f"{prefix}.{key}" if prefix else str(key), below)
    elif value == "???":
        yield prefix


def _typed(schema: type, data: Mapping[str, Any]) -> Config:
    group_types = groups(schema)
    hints = get_type_hints(schema)
    for key in data:
        if key not in hints:
            raise UserError(unknown_key(key, schema))
    top = {name: value for name, value in data.items() if name not in group_types}
    # First: other keys may take their value from these.
    config = _typed_values("", schema, top, leave_out=tuple(group_types))
    for name in hints:
        if name in group_types:
            config[name] = _typed_group(schema, name, group_types[name], data.get(name, {}))
    return config


def _typed_group(schema: type, name: str, group: type, values: Any) -> Config:
    if not isinstance(values, Mapping):
        raise UserError(
            f"{name}={shown(values)} must be a mapping; {name}=CHOICE picks a file of conf/{name}/"
        )
    hints = get_type_hints(group)
    extra: Config = {}
    for key, value in values.items():
        if key not in hints:
            _check_added_field(schema, name, str(key), value)
            extra[str(key)] = value
    known = {str(key): value for key, value in values.items() if key in hints}
    return {**_typed_values(f"{name}.", group, known), **extra}


def _typed_values(
    prefix: str, schema: type, values: Mapping[str, Any], leave_out: tuple[str, ...] = ()
) -> Config:
    node = OmegaConf.structured(schema)
    hints = get_type_hints(schema)
    for key, value in values.items():
        if hints[key] is bool and not isinstance(value, bool) and value not in (0, 1):
            raise UserError(f"{prefix}{key}={shown(value)} must be true or false")
        try:
            node[key] = value
        except OmegaConfBaseException as error:
            raise UserError(
                f"{prefix}{key}={shown(value)} must be {type_in_words(hints[key])}"
            ) from error
    typed: Config = {}
    for key in hints:
        if key in leave_out:
            continue
        if OmegaConf.is_missing(node, key):
            raise UserError(f"{prefix}{key} has no value; set {prefix}{key}=...")
        value = node[key]
        typed[key] = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return typed


def _check_added_field(schema: type, group: str, name: str, value: Any) -> None:
    key = f"{group}.{name}"
    if schema is not RunConfig or name not in passthrough.FIELDS.get(group, ()):
        raise UserError(unknown_key(key, schema))
    if key in passthrough.SET_BY:
        raise UserError(f"{key}={shown(value)} is set by {passthrough.SET_BY[key]}; use that key")
    if key in passthrough.PYTHON_OBJECTS:
        raise UserError(
            f"{key}={shown(value)}: this field takes a Python object; a configuration can't set it"
        )


def _check_values(config: Config) -> None:
    for key, allowed in CHOICES.items():
        value = value_of(config, key)
        if value is not None and value not in allowed:
            raise UserError(f"{key}={shown(value)} must be one of {', '.join(allowed)}")
    for key, minimum in _MINIMUM.items():
        value = value_of(config, key)
        if value is not None and value < minimum:
            instead = f", or {_NULL[key]}" if key in _NULL else ""
            raise UserError(f"{key}={value} must be at least {minimum}{instead}")
    if (seed := value_of(config, "seed")) is not None and seed >= 2**32:
        raise UserError(f"seed={seed} must be less than 2**32, which is what NumPy takes")
    for key in _ABOVE_ZERO:
        value = value_of(config, key)
        if value is not None and not 0 < value < inf:
            raise UserError(f"{key}={value} must be greater than 0")
    for key in _BELOW_ONE:
        value = value_of(config, key)
        if value is not None and not 0 <= value < 1:
            raise UserError(f"{key}={value} must be at least 0 and less than 1")
    if (percent := value_of(config, "model.rotary_percent")) is not None and percent > 1:
        raise UserError(f"model.rotary_percent={percent} must be at most 1, which is all channels")
    if "data" in config:
        _check_split(config["data"])
    _check_uneven_tp(config["uneven_tp"])


def _check_split(data: Config) -> None:
    """Check ``data.split``; a list of weights becomes the text that Megatron takes."""
    if isinstance(data["split"], (list, tuple)):
        data["split"] = ",".join(str(weight) for weight in data["split"])
    if not isinstance(data["split"], str):
        raise UserError(
            f"data.split={shown(data['split'])} must be the weights of training, validation and "
            "test, such as [900,50,50]"
        )
    split_weights(data["split"])


def _check_uneven_tp(uneven_tp: Config) -> None:
    for key in ("failed_ranks", "degrees", "rank_speeds"):
        if uneven_tp[key] and not uneven_tp["enabled"]:
            raise UserError(
                f"uneven_tp.{key}={uneven_tp[key]} needs uneven_tp=on, but it is off; "
                "drop one of the two"
            )


def _check_features(config: Config) -> None:
    for key, feature in _UNSUPPORTED.items():
        value = value_of(config, key)
        if value not in (None, False, 0):
            raise UnsupportedError(
                f"{key}={shown(value)}: {feature} is not supported yet; leave {key} out"
            )
    for key, feature in _ONLY_ONE.items():
        value = value_of(config, key)
        if value is not None and value != 1:
            raise UnsupportedError(f"{key}={value}: {feature} is not supported yet; set {key}=1")
    distributed = value_of(config, "optim.use_distributed_optimizer")
    if value_of(config, "strategy.overlap_param_gather") and not distributed:
        raise UserError(
            "strategy.overlap_param_gather=true needs optim.use_distributed_optimizer=true; set it "
            "to false"
        )
