"""The few places of NeMo that leave no door, patched in one place.

Each patch is bound to the behaviour it was written against and fails loudly when NeMo no
longer looks like it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import optimizer as mcore_optimizer
from nemo.collections.llm import api
from nemo.lightning import _strategy_lib

from nemo_uneven_tp.errors import UnevenTPError, UserError
from nemo_uneven_tp.optimizer import get_uneven_optimizer


class PatchError(UnevenTPError, RuntimeError):
    """NeMo no longer looks as a patch expects."""


@contextmanager
def uneven_optimizer() -> Iterator[None]:
    """While active, NeMo's optimizer module gets our optimizer.

    ``setup_megatron_optimizer`` imports ``get_megatron_optimizer`` when it is called.
    """
    _expect(_strategy_lib.setup_megatron_optimizer, "get_megatron_optimizer(")
    stock = mcore_optimizer.get_megatron_optimizer

    def replacement(config: Any, model_chunks: list[Any], **kwargs: Any) -> Any:
        return get_uneven_optimizer(config, model_chunks, stock, **kwargs)

    mcore_optimizer.get_megatron_optimizer = replacement
    try:
        yield
    finally:
        mcore_optimizer.get_megatron_optimizer = stock


def allow_unequal_micro_batches() -> None:
    """Let ``llm.pretrain`` accept batches that don't split evenly, under our strategy.

    ``_validate_config`` wants the global batch to be a multiple of micro-batch size x nominal
    replicas. For our strategy it is shown a batch that is; the plan has checked the real one.
    """
    stock = api._validate_config  # noqa: SLF001
    if getattr(stock, "_uneven_tp", False):
        return
    _expect(stock, "data.global_batch_size", "data.micro_batch_size")

    def validate(model: Any, data: Any, trainer: Any, **kwargs: Any) -> None:
        if not getattr(trainer.strategy, "is_uneven", False):
            stock(model, data, trainer, **kwargs)
            return
        size = data.global_batch_size
        nominal = trainer.num_devices * trainer.num_nodes
        data.global_batch_size = data.micro_batch_size * nominal
        try:
            stock(model, data, trainer, **kwargs)
        finally:
            data.global_batch_size = size

    validate._uneven_tp = True  # type: ignore[attr-defined]
    api._validate_config = validate  # noqa: SLF001


def let_nemo_call_newer_megatron() -> None:
    """Let NeMo 2.7 build an optimizer with Megatron-Core 0.16, stock runs included.

    NeMo passes arguments that 0.16 has removed; they are dropped where they say nothing.
    """
    stock = mcore_optimizer.get_megatron_optimizer
    removed = {"no_weight_decay_cond": None, "scale_lr_cond": None, "lr_mult": 1.0}
    if set(removed) <= set(inspect.signature(stock).parameters):
        return

    def accepting(config: Any, model_chunks: list[Any], **kwargs: Any) -> Any:
        for name, default in removed.items():
            if kwargs.pop(name, default) != default:
                raise UserError(
                    f"optim.{name} is set, but Megatron-Core 0.16 no longer takes it from NeMo "
                    "2.7; leave it out or use megatron-core 0.15"
                )
        return stock(config, model_chunks, **kwargs)

    # The wrapper shows the removed names, so that a second call finds nothing to do.
    setattr(accepting, "__signature__", _with_keywords(stock, removed))  # noqa: B010
    mcore_optimizer.get_megatron_optimizer = accepting


def _with_keywords(function: Any, names: dict[str, Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    keyword = inspect.Parameter.KEYWORD_ONLY
    extra = [inspect.Parameter(name, keyword, default=value) for name, value in names.items()]
    return signature.replace(parameters=[*signature.parameters.values(), *extra])


def _expect(function: Any, *texts: str) -> None:
    source = inspect.getsource(function)
    for text in texts:
        if text not in source:
            raise PatchError(
                f"{function.__module__}.{function.__qualname__} has changed (no {text!r} in it); "
                "this version of NeMo is not supported, use nemo_toolkit 2.7"
            )
