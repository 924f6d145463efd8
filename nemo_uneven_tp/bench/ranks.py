"""One process of ``uneven-tp bench``: ``python -m nemo_uneven_tp.bench.ranks FOLDER``.

All nominal ranks first compare the stock step with ours where nothing failed; then the
living ones, under their compact numbers, count a real step of the plan and time its gradient
sync against the peers. Each living rank leaves ``FOLDER/rank-N.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from nemo_uneven_tp import cpu_mode
from nemo_uneven_tp.bench import checkpoints
from nemo_uneven_tp.bench.model import Trainee
from nemo_uneven_tp.bench.reshard_first import ReshardFirst
from nemo_uneven_tp.bench.timed import alternate, paired_ratio, quartiles
from nemo_uneven_tp.parallel_state import (
    UnevenState,
    destroy_uneven_model_parallel,
    initialize_uneven_model_parallel,
)
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.wire import Call, Traffic, count_traffic

TIMEOUT_S = 300


def main(folder: str) -> int:
    """Be the process whose rank the environment gives."""
    task = json.loads((Path(folder) / "task.json").read_text())
    plan, undamaged = Plan.from_dict(task["plan"]), task["undamaged"]
    nominal = int(os.environ["RANK"])
    cpu_mode.activate()
    torch.set_num_threads(1)
    times: dict[str, Any] = {}
    if undamaged is not None:
        whole = Plan.from_dict(undamaged)
        _join(folder, "nominal", nominal, whole.world_size)
        times |= compare_with_stock(task["config"], whole, task["pairs"])
        dist.destroy_process_group()
    rank = plan.compact_rank(nominal)
    if rank is None:
        return 0
    _join(folder, "living", rank, plan.world_size)
    counted = count(task["config"], plan)
    if undamaged is not None:
        times |= compare_sync(task["config"], plan, task["rounds"])
        peer = Plan.from_dict(task["peer"])
        times |= checkpoints.compare(
            task["config"], plan, peer, Path(folder), task["checkpoint_rounds"]
        )
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps({"counts": counted, "times": times}))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def _join(folder: str, name: str, rank: int, world_size: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder).absolute() / name}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )


def compare_with_stock(config: dict[str, Any], plan: Plan, pairs: int) -> dict[str, Any]:
    """Whole steps, stock against ours, on a plan where nothing failed."""
    state = initialize_uneven_model_parallel(plan)
    try:
        trainees = {}
        for name in ("stock", "uneven_tp"):
            _seed(config)
            trainees[name] = Trainee(config, plan, state.cell.replica, stock=name == "stock")
        seconds = alternate({name: t.step for name, t in trainees.items()}, pairs)
    finally:
        destroy_uneven_model_parallel()
    return {
        "noop_step_time_ratio": paired_ratio(seconds["uneven_tp"], seconds["stock"]),
        "noop_pairs": pairs,
        "noop_step_time_ratio_quartiles": quartiles(seconds["uneven_tp"], seconds["stock"]),
        "step_time_s": {name: median(times) for name, times in seconds.items()},
    }


def count(config: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """One real step: every collective and the tensors it leaves."""
    cpu_mode.activate()
    state = initialize_uneven_model_parallel(plan)
    try:
        _seed(config)
        trainee = Trainee(config, plan, state.cell.replica, stock=False)
        with count_traffic() as computing:
            trainee.compute()
        with count_traffic() as updating:
            trainee.update()
        between = _peer_groups(state)
        sync = [c for c in computing.calls if c.ranks in between and c.kind in _SYNC]
        gather = [c for c in updating.calls if c.ranks in between and c.kind == "all_gather"]
        handed_on = [c for c in computing.calls + updating.calls if c.kind == "broadcast"]
        return {
            "grad_sync_bytes": sum(c.nbytes for c in sync),
            "grad_sync_calls": len(sync),
            "param_gather_bytes": sum(c.nbytes for c in gather),
            "param_gather_calls": len(gather),
            "cell_broadcast_bytes": sum(c.nbytes for c in handed_on),
            "gradient_bytes": sum(_nbytes(b.grad_data) for b in trainee.chunk.buffers),
            "optimizer_bytes": optimizer_bytes(trainee.optimizer, trainee.model),
            "staging_bytes": staging_bytes(trainee.chunk),
            "collectives": _tally(computing, "compute") + _tally(updating, "update"),
        }
    finally:
        destroy_uneven_model_parallel()


_SYNC = ("all_reduce", "reduce_scatter")


def _peer_groups(state: UnevenState) -> set[tuple[int, ...]]:
    if state.plan.is_uniform:
        group = mpu.get_data_parallel_group(with_context_parallel=True)
        return {tuple(dist.get_process_group_ranks(group))}
    return set(state.sync_groups)


def _tally(traffic: Traffic, phase: str) -> list[dict[str, Any]]:
    by_kind: dict[tuple[str, tuple[int, ...]], list[Call]] = {}
    for call in traffic.calls:
        by_kind.setdefault((call.kind, call.ranks), []).append(call)
    return [
        {
            "phase": phase,
            "kind": kind,
            "ranks": list(ranks),
            "calls": len(calls),
            "bytes": sum(call.nbytes for call in calls),
        }
        for (kind, ranks), calls in by_kind.items()
    ]


def optimizer_bytes(optimizer: Any, model: torch.nn.Module) -> int:
    """Bytes of fp32 main parameters and moments that are not the model's own memory."""
    tensors: dict[int, torch.Tensor] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    (part,) = optimizer.chained_optimizers
    for group in part.optimizer.param_groups:
        for param in group["params"]:
            if param.untyped_storage().data_ptr() not in own:
                tensors[id(param)] = param
            for name, value in part.optimizer.state.get(param, {}).items():
                if name != "step":
                    tensors[id(value)] = value
    return sum(_nbytes(t) for t in tensors.values())


def staging_bytes(chunk: Any) -> int:
    """Bytes of the buffers that buckets are packed into."""
    found = [getattr(group, "staging", None) for group in chunk.bucket_groups]
    return sum(s.nbytes for s in {id(s): s for s in found if s is not None}.values())


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def compare_sync(config: dict[str, Any], plan: Plan, rounds: int) -> dict[str, Any]:
    """Gradient sync by segments against one stock all-reduce and against reshard-first.

    All with all-reduce, after the backward pass: the optimizer is not sharded here.
    """
    if plan.is_uniform:
        return {}
    plain = {
        **config,
        "optim": {**config["optim"], "use_distributed_optimizer": False},
        "strategy": {
            **config["strategy"],
            "overlap_grad_reduce": False,
            "overlap_param_gather": False,
            "check_for_nan_in_grad": False,
        },
    }
    state = initialize_uneven_model_parallel(plan)
    try:
        _seed(config)
        trainee = Trainee(plain, plan, state.cell.replica, stock=False)
        named = list(trainee.model.named_parameters())
        peer = ReshardFirst(named, state, trainee.chunk.bucket_groups[0].scale)
        by_segments = trainee.chunk.finish_grad_sync

        def segments() -> None:
            for group in trainee.chunk.bucket_groups:
                group.reset()
            by_segments()

        # What the rank of the same number sends at the smallest degree, in one collective.
        flat = torch.zeros_like(peer.buffer)

        def one_all_reduce() -> None:
            if peer.meets:
                dist.all_reduce(flat, group=mpu.get_data_parallel_group())

        def step_with(sync: Callable[[], None]) -> Callable[[], None]:
            def step() -> None:
                trainee.chunk.finish_grad_sync = sync
                trainee.step()

            return step

        for _, parameter in named:
            parameter.main_grad.fill_(1e-3)
        syncs = {"segments": segments, "all_reduce": one_all_reduce, "reshard_first": peer.sync}
        seconds = alternate(syncs, 3 * rounds)
        steps = {"segments": step_with(by_segments), "reshard_first": step_with(peer.sync)}
        step_seconds = alternate(steps, rounds)
    finally:
        destroy_uneven_model_parallel()
    return {
        "sync_time_s": {name: median(times) for name, times in seconds.items()},
        "sync_time_ratio_to_all_reduce": paired_ratio(seconds["segments"], seconds["all_reduce"]),
        "reshard_first": {
            "step_time_ratio_to_segments": paired_ratio(
                step_seconds["reshard_first"], step_seconds["segments"]
            ),
            "sync_time_ratio_to_segments": paired_ratio(
                seconds["reshard_first"], seconds["segments"]
            ),
        },
    }


def _seed(config: dict[str, Any]) -> None:
    torch.manual_seed(config["seed"])
    model_parallel_cuda_manual_seed(config["seed"])
    torch.manual_seed(config["seed"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
