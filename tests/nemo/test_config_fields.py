"""Names and constants written down in config/ are those of the installed NeMo and Megatron."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from nemo_uneven_tp.config import passthrough
from nemo_uneven_tp.config.schema import ACTIVATIONS, ModelConfig, OptimConfig, StrategyConfig
from nemo_uneven_tp.config.vocabulary import BYTE_VOCAB_SIZE

pytestmark = pytest.mark.timeout(180)  # importing NeMo takes half a minute
pytest.importorskip("nemo.collections.llm")


def names(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


def test_fields_of_gpt_config() -> None:
    from nemo.collections.llm import GPTConfig

    assert {f.name for f in dataclasses.fields(GPTConfig) if f.init} == set(
        passthrough.GPT_CONFIG_FIELDS
    )
    own = {"activation", "reference_tensor_parallel_size"}
    assert names(ModelConfig) - own <= passthrough.GPT_CONFIG_FIELDS


def test_arguments_of_megatron_strategy() -> None:
    from nemo.lightning import MegatronStrategy

    arguments = set(inspect.signature(MegatronStrategy.__init__).parameters) - {"self", "kwargs"}
    assert arguments == set(passthrough.MEGATRON_STRATEGY_ARGS)
    assert names(StrategyConfig) <= arguments | passthrough.DDP_CONFIG_FIELDS


def test_fields_of_ddp_config() -> None:
    from megatron.core.distributed import DistributedDataParallelConfig

    assert names(DistributedDataParallelConfig) == set(passthrough.DDP_CONFIG_FIELDS)


def test_fields_of_optimizer_config() -> None:
    from megatron.core.optimizer import OptimizerConfig

    assert names(OptimizerConfig) == set(passthrough.OPTIMIZER_CONFIG_FIELDS)
    schedule = {"warmup_steps", "constant_steps"}
    assert names(OptimConfig) - schedule <= passthrough.OPTIMIZER_CONFIG_FIELDS


def test_fields_that_are_refused_exist() -> None:
    for key in {*passthrough.SET_BY, *passthrough.PYTHON_OBJECTS}:
        group, _, name = key.partition(".")
        assert name in passthrough.FIELDS[group], key


def test_byte_tokenizer() -> None:
    from nemo.collections.common.tokenizers.bytelevel_tokenizers import ByteLevelTokenizer

    assert ByteLevelTokenizer().vocab_size == BYTE_VOCAB_SIZE


def test_activations_have_a_function() -> None:
    from nemo_uneven_tp.nemo.pretrain import activation

    assert all(callable(activation(name)) for name in ACTIVATIONS)
