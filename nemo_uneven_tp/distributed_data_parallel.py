"""Megatron's ``DistributedDataParallel`` with gradient sync by segments.

The stock class allocates the gradient buffer, maps ``main_grad`` and registers the hooks;
only its bucket groups are replaced. Where all replicas are alike it is left exactly as it is.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_uneven_tp.buckets import make_buckets, place_gradients
from nemo_uneven_tp.errors import UnsupportedError
from nemo_uneven_tp.grad_sync import ReplicatedBucketGroup, SegmentBucketGroup, Staging
from nemo_uneven_tp.initial_weights import broadcast_by_segment, broadcast_tied
from nemo_uneven_tp.parallel_state import get_state
from nemo_uneven_tp.sharded_sync import (
    ShardedBucketGroup,
    ShardedReplicatedBucketGroup,
    chain_in_forward_order,
)


class UnevenDistributedDataParallel(DistributedDataParallel):
    """Data parallelism over replicas of different degree and different numbers of micro-batches.

    The gradient of a step is that of the stock run: each replica's mean over its own
    micro-batches counts with its part of the global batch, or, with
    ``calculate_per_token_loss``, every token counts the same.
    """

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        **kwargs: Any,
    ) -> None:
        state = get_state()
        if config.fp16 and ddp_config.check_for_nan_in_grad:
            # Loss scaling expects overflows and skips the step; Megatron's trainer does the same.
            ddp_config = replace(ddp_config, check_for_nan_in_grad=False)
        if state.plan.is_uniform:
            super().__init__(config, ddp_config, module, disable_bucketing, **kwargs)
            return
        refuse_unsupported(config, ddp_config)
        local = copy.copy(ddp_config)
        # The stock part only allocates gradients here; sharding of the optimizer is ours.
        local.use_distributed_optimizer = False
        local.overlap_param_gather = False
        local.average_in_collective = False
        super().__init__(config, local, module, disable_bucketing=True, **kwargs)
        self.uneven_state = state
        if state.plan.ties_stages:
            broadcast_tied(module, state)
        self.ddp_config = ddp_config
        self.bucket_groups = self._segment_bucket_groups(config)
        self.param_to_bucket_group = {
            param: group for group in self.bucket_groups for param in group.bucket.params
        }
        self.use_forward_hook = (
            ddp_config.use_distributed_optimizer and ddp_config.overlap_param_gather
        )
        if self.use_forward_hook:
            self.enable_forward_pre_hook()

    def _segment_bucket_groups(self, config: TransformerConfig) -> list[SegmentBucketGroup]:
        state, ddp_config = self.uneven_state, self.ddp_config
        plan = state.plan
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        buckets = make_buckets(plan, state.rank, named, ddp_config.bucket_size)
        per_token = config.calculate_per_token_loss
        share = plan.micro_batches[state.cell.replica] / sum(plan.micro_batches)
        options: dict[str, Any] = {
            "scale": 1.0 if per_token else share,
            "overlap": ddp_config.overlap_grad_reduce,
            "check_for_nan": ddp_config.check_for_nan_in_grad,
        }
        sharded: type[SegmentBucketGroup] = SegmentBucketGroup
        replicated: type[ReplicatedBucketGroup] = ReplicatedBucketGroup
        if ddp_config.use_distributed_optimizer:
            sharded, replicated = ShardedBucketGroup, ShardedReplicatedBucketGroup
            options["overlap_param_gather"] = ddp_config.overlap_param_gather
        partial = partial_params(config, named)
        groups: list[SegmentBucketGroup] = []
        for buffer in self.buffers:
            mine = [b for b in buckets if b.params[0] in buffer.param_to_bucket]
            memory = torch.zeros_like(buffer.grad_data)
            place_gradients(mine, memory)
            buffer.grad_data = memory
            buffer.buckets = []
            size = max(sharded.staging_numel(bucket) for bucket in mine)
            staging = Staging(size, memory.dtype, memory.device)
            for bucket in mine:
                if bucket.replicated:
                    groups.append(replicated(bucket, state, staging, partial=partial, **options))
                else:
                    groups.append(sharded(bucket, state, staging, **options))
        if ddp_config.use_distributed_optimizer:
            chain_in_forward_order(groups)
        return groups

    def start_grad_sync(self, *unused: Any) -> None:
        """Start what may run during the backward pass (schedules of several stages call this)."""
        if get_state().plan.is_uniform:
            super().start_grad_sync(*unused)
            return
        for group in self.bucket_groups:
            if not group.bucket.at_end:
                group.start_grad_sync()

    def start_param_sync(self, *unused: Any, force_sync: bool = False, **later: Any) -> None:
        """Gather parameters that the distributed optimizer has changed, as in the stock class."""
        if get_state().plan.is_uniform:
            super().start_param_sync(*unused, force_sync=force_sync, **later)
            return
        for group in self.bucket_groups:
            group.start_param_sync(force_sync=force_sync)

    def broadcast_params(self) -> None:
        """Copy the parameters of the first replica to all others."""
        state = get_state()
        if state.plan.is_uniform:
            super().broadcast_params()
        else:
            broadcast_by_segment(self.module, state)


def partial_params(
    config: TransformerConfig,
    named_params: list[tuple[str, torch.nn.Parameter]],
) -> set[torch.nn.Parameter]:
    """Replicated parameters whose gradient is a sum over the ranks of the cell.

    The cases Megatron's ``finalize_model_grads`` knows: parameters marked
    ``sequence_parallel``, and the layer norms of q and k, which see only a rank's own heads.
    """
    found = set()
    for name, param in named_params:
        marked = config.sequence_parallel and getattr(param, "sequence_parallel", False)
        of_heads = getattr(config, "qk_layernorm", False) and (
            "q_layernorm" in name or "k_layernorm" in name
        )
        if marked or of_heads:
            found.add(param)
    return found


def refuse_unsupported(
    config: TransformerConfig, ddp_config: DistributedDataParallelConfig
) -> None:
    """Refuse data-parallel features that have no uneven counterpart.

    Raises:
        UnsupportedError: naming the field and what to set.
    """
    wanted = {
        "use_megatron_fsdp": False,
        "use_custom_fsdp": False,
        "num_distributed_optimizer_instances": 1,
        "fp8_param_gather": False,
        "nccl_ub": False,
        "delay_wgrad_compute": False,
    }
    for field, value in wanted.items():
        current = getattr(ddp_config, field, value)
        if current != value:
            raise UnsupportedError(
                f"strategy.ddp.{field}={current} is not supported by uneven tensor parallelism; "
                f"set it to {value}"
            )
    if ddp_config.average_in_collective and config.calculate_per_token_loss:
        raise UnsupportedError(
            "strategy.ddp.average_in_collective=True can't go with model.calculate_per_token_loss="
            "True, in stock Megatron either; set one of them to False"
        )
