"""Corrections of Megatron's ``DistributedOptimizer`` where it writes and reads checkpoints.

* Torch's Adam keeps ``step`` as a tensor in the state of each parameter. Megatron expects
  none: a fresh process has no ``step`` to look up, shards are asked for a ``step`` of their
  size, and after loading all parameters share one, which then advances once per parameter.
* ``fully_reshardable`` gathers buckets without the padding between them but looks parameters
  up as if it were there, so with several buckets it writes other parameters' elements
  (Megatron-Core 0.15 to 0.19).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

_MARK = "_uneven_tp_corrected"


def apply() -> None:
    """Correct ``DistributedOptimizer`` in this process. Safe to call more than once."""
    if getattr(DistributedOptimizer, _MARK, False):
        return
    setattr(DistributedOptimizer, _MARK, True)
    for name, correct in {
        "state_dict": _with_state,
        "load_state_dict": _with_steps_apart,
        "_get_main_param_and_optimizer_states": _without_step,
        "_set_main_param_and_optimizer_states": _keeping_step,
        "sharded_param_state_fully_reshardable": _at_unpadded_places,
    }.items():
        setattr(DistributedOptimizer, name, correct(getattr(DistributedOptimizer, name)))


Method = Callable[..., Any]


def _with_state(stock: Method) -> Method:
    @wraps(stock)
    def state_dict(self: Any) -> Any:
        inner = self.optimizer
        if isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)) and not inner.state:
            for group in inner.param_groups:
                for main in group["params"]:
                    inner.state[main] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(main),
                        "exp_avg_sq": torch.zeros_like(main),
                    }
        return stock(self)

    return state_dict


def _with_steps_apart(stock: Method) -> Method:
    @wraps(stock)
    def load_state_dict(self: Any, state_dict: Any) -> Any:
        result = stock(self, state_dict)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].detach().clone()
        return result

    return load_state_dict


def _without_step(stock: Method) -> Method:
    @wraps(stock)
    def get(self: Any, model_param: Any) -> Any:
        return {name: value for name, value in stock(self, model_param).items() if name != "step"}

    return get


def _keeping_step(stock: Method) -> Method:
    @wraps(stock)
    def set_(self: Any, model_param: Any, tensors: Any) -> Any:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        if "step" in state:
            tensors = {**tensors, "step": state["step"]}
        with torch.no_grad():
            return stock(self, model_param, tensors)

    return set_


def _at_unpadded_places(stock: Method) -> Method:
    @wraps(stock)
    def sharded_param_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _unpadded_index_maps(self.buffers):
            return stock(self, *args, **kwargs)

    return sharded_param_state


@contextmanager
def _unpadded_index_maps(buffers: list[Any]) -> Iterator[None]:
    """While active, ``param_index_map`` counts elements without the padding between buckets."""
    padded = [buffer.param_index_map for buffer in buffers]
    try:
        for buffer in buffers:
            before, padding = {}, 0
            for bucket in buffer.buckets:
                before[bucket.bucket_id] = padding
                padding += bucket.grad_data.numel() - bucket.numel_unpadded
            buffer.param_index_map = {
                param: (start - before[bucket], stop - before[bucket], bucket)
                for param, (start, stop, bucket) in buffer.param_index_map.items()
            }
        yield
    finally:
        for buffer, index_map in zip(buffers, padded, strict=True):
            buffer.param_index_map = index_map
