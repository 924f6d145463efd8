"""Megatron's distributed optimizer over replicas of different degree.

Optimizer state is sharded over each sync group (design section 4): gradients arrive
reduce-scattered in the shards of :mod:`nemo_uneven_tp.sharded_sync`, Adam or SGD steps the
fp32 shard, the parameters are all-gathered in their own dtype. ``OptimizerConfig`` stays the
interface; the inner optimizer and its parameter groups (weight decay, learning rate
multipliers) are those Megatron would build.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer, MixedPrecisionOptimizer

from nemo_uneven_tp.checkpoint.optimizer_state import load_state, sharded_state
from nemo_uneven_tp.errors import UnsupportedError
from nemo_uneven_tp.sharded_sync import OptimizerShard, ShardedBucketGroup


def build_distributed_optimizer(
    config: OptimizerConfig,
    model_chunks: list[Any],
    build: Callable[..., MegatronOptimizer],
    **kwargs: Any,
) -> ChainedOptimizer:
    """The distributed optimizer of chunks wrapped in our DDP.

    Args:
        build: Megatron's ``get_megatron_optimizer``; builds the inner optimizer.

    Raises:
        UnsupportedError: for optimizer features that have no uneven counterpart.
    """
    refuse_unsupported(config)
    inner_config = copy.copy(config)
    inner_config.use_distributed_optimizer = False
    inner_config.overlap_param_gather = False
    inner_config.bf16 = inner_config.fp16 = False
    # A plain fp32 optimizer over the model's own parameters: no state yet, right groups.
    stock = build(inner_config, model_chunks, **kwargs)
    (inner,) = getattr(stock, "chained_optimizers", [stock])
    groups = [g for c in model_chunks for g in c.bucket_groups if isinstance(g, ShardedBucketGroup)]
    optimizer = UnevenDistributedOptimizer(inner.optimizer, config, inner.init_state_fn, groups)
    return ChainedOptimizer([optimizer])


class UnevenDistributedOptimizer(MixedPrecisionOptimizer):
    """Steps this rank's optimizer shards.

    Each overlap of a shard with a piece of a parameter is one entry of the inner optimizer: a
    1-D fp32 view of the shard, in the parameter's group.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimizerConfig,
        init_state_fn: Callable[..., Any],
        bucket_groups: list[ShardedBucketGroup],
    ) -> None:
        super().__init__(optimizer, config, _grad_scaler(config), init_state_fn)
        self.is_stub_optimizer = False
        self.grad_stats_parallel_group = dist.group.WORLD
        self.bucket_groups = bucket_groups
        self.shards: list[OptimizerShard] = [
            shard for group in bucket_groups for shard in group.shards.values()
        ]
        self.mains: list[list[torch.Tensor]] = []
        """The inner optimizer's parameters: per shard, one for each of its parts."""
        self._grads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._put_shards_into_groups()
        self._copy_model_params_to_main_params()

    def _put_shards_into_groups(self) -> None:
        group_of = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        for group in self.optimizer.param_groups:
            group["params"] = []
        for shard in self.shards:
            shard.main = torch.zeros(
                shard.stop - shard.start, dtype=torch.float32, device=shard.grad.device
            )
            self.mains.append([])
            for param, _, in_shard, _ in shard.parts():
                main = shard.main[in_shard]
                self.mains[-1].append(main)
                # Over the world, every element counts once.
                setattr(main, "tensor_model_parallel", True)  # noqa: B010
                self._grads.append((main, shard.grad[in_shard]))
                group_of[param]["params"].append(main)

    # --- what MixedPrecisionOptimizer asks for --------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients of model and main parameters."""
        for group in self.bucket_groups:
            for param in group.bucket.params:
                param.grad = None
        for main, _ in self._grads:
            main.grad = None

    def _copy_model_grads_to_main_grads(self) -> None:
        for main, grad in self._grads:
            main.grad = grad.float()

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        return [main.grad for main, _ in self._grads if main.grad is not None]

    def _copy_main_params_to_model_params(self) -> None:
        for group in self.bucket_groups:
            group.params_changed()
        for group in self.bucket_groups:
            if not group.overlap_param_gather:
                group.start_param_sync()

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        for group in self.bucket_groups:
            group.load_main_params()

    def state_dict(self) -> dict[str, Any]:
        """State of this rank's shards; it fits only the same plan."""
        state = {
            "optimizer": self.optimizer.state_dict(),
            "main": [shard.main for shard in self.shards],
        }
        if self.grad_scaler:
            state["grad_scaler"] = self.grad_scaler.state_dict()
        return state

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any],
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """State for a checkpoint that any layout can read (:mod:`.checkpoint.optimizer_state`)."""
        return sharded_state(self, model_sharded_state_dict, metadata)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` or :meth:`sharded_state_dict` gave."""
        if "param_state" in state_dict:
            load_state(self, state_dict)
        else:
            self._load_own_state(state_dict)
        for group in self.bucket_groups:
            group.params_changed()
            group.start_param_sync(force_sync=True)

    def _load_own_state(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["optimizer"])
        for shard, main in zip(self.shards, state_dict["main"], strict=True):
            assert shard.main is not None
            shard.main.copy_(main)
        if self.grad_scaler and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])


def refuse_unsupported(config: OptimizerConfig) -> None:
    """Refuse optimizer features that have no uneven counterpart.

    Raises:
        UnsupportedError: naming the field and what to set.
    """
    wanted = {
        "use_precision_aware_optimizer": False,
        "optimizer_cpu_offload": False,
        "overlap_param_gather_with_optimizer_step": False,
        "reuse_grad_buf_for_mxfp8_param_ag": False,
        "use_layer_wise_distributed_optimizer": False,
    }
    for field, value in wanted.items():
        current = getattr(config, field, value)
        if current not in (value, None):
            raise UnsupportedError(
                f"optim.{field}={current} is not supported by uneven tensor parallelism; set it to "
                f"{str(value).lower()}"
            )
    if config.optimizer not in ("adam", "sgd"):
        raise UnsupportedError(
            f"optim.optimizer={config.optimizer} is not supported by uneven tensor parallelism; "
            "use adam or sgd"
        )


def _grad_scaler(config: OptimizerConfig) -> ConstantGradScaler | DynamicGradScaler | None:
    """The loss scaler Megatron's own optimizers would have for ``config``."""
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    if not config.fp16:
        return None
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
