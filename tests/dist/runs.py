"""What the ranks of the optimizer, precision and failure tests do.

Small fixed cases, and an uneven run that something can be done to in the middle.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_uneven_tp import cpu_mode
from nemo_uneven_tp.batch import assign_micro_batches
from nemo_uneven_tp.model_shape import ModelShape
from nemo_uneven_tp.parallel_state import (
    destroy_uneven_model_parallel,
    initialize_uneven_model_parallel,
)
from nemo_uneven_tp.replica_check import check_replicas, find_differences
from nemo_uneven_tp.wire import count_traffic
from tests.dist.parity import Case, build_uneven, train


def small_case(degrees: tuple[int, ...] = (2, 1), **fixed: Any) -> Case:
    """A Llama-like model that stock Megatron builds at TP1 and TP2, four micro-batches."""
    shape = ModelShape(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        ffn_hidden_size=24,
        vocab_size=23,
        seq_length=8,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        make_vocab_size_divisible_by=4,
    )
    overrides = {k: fixed.pop(k) for k in list(fixed) if k in ModelShape.__dataclass_fields__}
    case = Case(
        seed=7,
        shape=replace(shape, **overrides),
        degrees=degrees,
        global_batch_size=4,
        micro_batch_size=1,
    )
    return replace(case, **fixed)


class Session:
    """One rank's uneven run, with the places where tests reach in."""

    def __init__(self, case: Case) -> None:
        cpu_mode.activate()
        self.case = case
        self.plan = case.plan()
        self.state = initialize_uneven_model_parallel(self.plan)
        self.config, self.model, self.chunk, self.optimizer = build_uneven(case)

    def train(
        self,
        before_step: Callable[[int], None] | None = None,
        after_step: Callable[[int], None] | None = None,
    ) -> dict[str, Any]:
        """Train to the end."""
        mine = list(assign_micro_batches(self.plan.micro_batches)[self.state.cell.replica])
        arguments = (self.case, self.config, self.model, self.chunk, self.optimizer, mine)
        return train(*arguments, self.plan, before_step, after_step)

    def parameter(self, name: str) -> torch.nn.Parameter:
        """The parameter whose name ends with ``name``."""
        return next(p for n, p in self.model.named_parameters() if n.endswith(name))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        destroy_uneven_model_parallel()


def spoil_gradient(parameter: torch.nn.Parameter, value: float) -> Callable[[], None]:
    """Put ``value`` into the first element of the next gradients; returns what ends it."""

    def spoiled(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    handle = parameter.register_hook(spoiled)
    return handle.remove


def run_with_spoiled_gradient(
    case: Case, name: str, rank: int, step: int, value: float
) -> dict[str, Any]:
    """Train; in ``step``, ``rank``'s gradient of ``name`` gets ``value``."""
    with Session(case) as session:
        undo: list[Callable[[], None]] = []

        def before(now: int) -> None:
            if now == step and session.state.rank == rank:
                undo.append(spoil_gradient(session.parameter(name), value))

        def after(now: int) -> None:
            while undo:
                undo.pop()()

        report = session.train(before, after)
        report["differences"] = find_differences([session.chunk], session.optimizer)
        return report


def end_at_error(run: str, folder: str, **arguments: Any) -> None:
    """Run a function of this module; an error ends the process, as it ends a worker.

    What was raised is left in ``folder``, one file per rank.
    """
    rank = dist.get_rank()
    try:
        globals()[run](**arguments)
    except BaseException as error:  # noqa: BLE001 - a worker ends whatever it was
        (Path(folder) / str(rank)).write_text(f"{type(error).__name__}: {error}")
        os._exit(1)


def run_comparing_replicas(case: Case, every: int) -> dict[str, Any]:
    """Train and compare all replicas every few steps."""
    with Session(case) as session:

        def after(step: int) -> None:
            if step % every == 0:
                check_replicas([session.chunk], session.optimizer)

        return session.train(after_step=after)


def differences_after_flip(
    case: Case, name: str, rank: int, what: str = "parameter"
) -> tuple[list[str], list[str], list[tuple[str, tuple[int, ...], int]]]:
    """Differences before and after one bit flips on ``rank``, and the traffic of the first."""
    with Session(case) as session:
        session.train()
        with count_traffic() as traffic:
            before = find_differences([session.chunk], session.optimizer)
        if session.state.rank == rank:
            parameter = session.parameter(name)
            tensor = parameter.data
            if what != "parameter":
                (inner,) = session.optimizer.chained_optimizers
                main = getattr(parameter, "main_param", parameter)
                tensor = main.data if what == "main" else inner.optimizer.state[main][what]
            flip_bit(tensor)
        after = find_differences([session.chunk], session.optimizer)
        return before, after, [(c.kind, c.ranks, c.nbytes) for c in traffic.calls]


def differences_after_shard_flip(case: Case, rank: int) -> list[str]:
    """Differences one step after a bit of ``rank``'s optimizer shard flips."""
    with Session(case) as session:
        session.train()
        if session.state.rank == rank:
            (inner,) = session.optimizer.chained_optimizers
            flip_bit(inner.shards[0].main)
        session.train()
        return find_differences([session.chunk], session.optimizer)


def flip_bit(tensor: torch.Tensor) -> None:
    """Flip the lowest bit of the last element."""
    integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    last = tuple(n - 1 for n in tensor.shape)
    tensor.view(integers)[last] ^= 1


def equal_from_perturbed(case: Case) -> dict[str, torch.Tensor]:
    """Parameters after replicas that start differently got those of the first."""
    with Session(case) as session:
        generator = torch.Generator().manual_seed(session.state.cell.replica)
        for name, parameter in session.model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or "position" in name or name.endswith(("proj.bias", "fc2.bias")):
                noise = noise * 0 + session.state.cell.replica  # replicated: equal inside a cell
            parameter.data.add_(noise.to(parameter.dtype))
        session.chunk.broadcast_params()
        return {n: p.detach().clone() for n, p in session.model.named_parameters()}


def run_and_die(case: Case, rank: int, step: int) -> None:
    """``rank`` is killed while ``step`` is under way."""
    with Session(case) as session:

        def die(gradient: torch.Tensor) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        def before(now: int) -> None:
            if now == step and session.state.rank == rank:
                session.parameter("linear_fc2.weight").register_hook(die)

        session.train(before)


def memory_of(case: Case) -> dict[str, int]:
    """Bytes of real tensors after training: staging, gradients (fp32), optimizer state."""
    with Session(case) as session:
        session.train()
        groups = session.chunk.bucket_groups
        staging = {id(g.staging): g.staging.nbytes for g in groups}
        (inner,) = session.optimizer.chained_optimizers
        elements = sum(
            value.numel() * value.element_size()
            for state in inner.optimizer.state.values()
            for key, value in state.items()
            if key != "step"
        )
        main = sum(s.main.numel() * 4 for s in inner.shards)
        return {
            "staging": sum(staging.values()),
            "largest_bucket": 4 * max(sum(p.numel() for p in g.bucket.params) for g in groups),
            "buckets": len(groups),
            "packed_buffers": sum(len(g.bucket.pieces) for g in groups),
            "gradients": sum(4 * b.grad_data.numel() for b in session.chunk.buffers),
            "parameters": sum(p.numel() for p in session.model.parameters()),
            "optimizer": elements + main,
        }
