"""Run Megatron-Core and NeMo without CUDA.

Both name CUDA in many calls that mean "this rank's device". :func:`activate` gives those calls
their CPU meaning where no CUDA is there, and does nothing where it is. Nothing computes
differently: what the stock code computes on a CPU tensor is what comes out.

On CPU, torch's default generator stands in for the CUDA one, so Megatron's RNG tracker forks
the generator that the operations really draw from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_active = False


def activate() -> bool:
    """Make this process run on CPU if it has no CUDA. Safe to call more than once.

    The mode that translates devices belongs to the calling thread and the autograd threads
    it starts; threads of one's own call tensors' CPU methods directly.

    Returns:
        Whether CPU mode is on.
    """
    global _active
    if torch.cuda.is_available():
        return False
    if not _active:
        # Megatron first: it loads TorchDynamo, which lists torch.cuda's functions and wants
        # every one to be another.
        _replace_megatron()
        _replace_torch_cuda()
        CudaToCpu().__enter__()
        _active = True
    return True


def is_active() -> bool:
    """Whether :func:`activate` has switched this process to CPU."""
    return _active


class CudaToCpu(TorchFunctionMode):
    """Gives device arguments that say CUDA their CPU meaning, for the calling thread."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with devices translated."""
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if kwargs.get("pin_memory"):  # pinning needs a CUDA context
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(arg) else arg for arg in args)
        elif func is torch.Tensor.type:
            return _tensor_type(func, args, kwargs)
        return func(*args, **kwargs)


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, torch.device) and device.type == "cuda"


def _tensor_type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Tensor.type()``: Megatron's optimizers sort parameters by CUDA type names."""
    if len(args) == 1 and not kwargs:
        return str(func(*args)).replace("torch.", "torch.cuda.", 1)
    return func(
        *(a.replace("torch.cuda.", "torch.", 1) if isinstance(a, str) else a for a in args),
        **kwargs,
    )


class _Stream:
    """Stands in for a CUDA stream: on CPU everything is done in program order."""

    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what ``torch.cuda.Stream`` takes."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing runs apart from this thread."""

    def wait_event(self, event: Any) -> None:
        """Nothing runs apart from this thread."""

    def synchronize(self) -> None:
        """Nothing runs apart from this thread."""

    def record_event(self, event: Any = None) -> Any:
        """Return the event, or a new one."""
        return event or _Event()


class _Event:
    """Stands in for a CUDA event: what was recorded has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what ``torch.cuda.Event`` takes."""

    def record(self, *args: Any) -> None:
        """What was recorded has happened."""

    def wait(self, *args: Any) -> None:
        """What was recorded has happened."""

    def synchronize(self) -> None:
        """What was recorded has happened."""

    def query(self) -> bool:
        """What was recorded has happened."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """CPU events keep no time."""
        return 0.0


@contextlib.contextmanager
def _use_stream(stream: Any) -> Iterator[None]:
    yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    """There is no device to act on."""


def _zero(*args: Any, **kwargs: Any) -> int:
    """There is no device memory."""
    return 0


def _replace_torch_cuda() -> None:
    only = _Stream()
    stand_ins: dict[str, Any] = {
        # Used as ``device=``, so the CPU device is the right answer.
        "current_device": lambda: CPU,
        # Selecting and waiting for a device: there is one, and it is never behind.
        "set_device": _nothing,
        "synchronize": _nothing,
        # Gradient sync and pipelines order their work by streams and events.
        "Stream": _Stream,
        "Event": _Event,
        "stream": _use_stream,
        "current_stream": lambda *a, **k: only,
        "default_stream": lambda *a, **k: only,
        # Memory statistics that NeMo and Megatron print, and caches they empty.
        "empty_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
        "max_memory_allocated": _zero,
        "max_memory_reserved": _zero,
        "memory_allocated": _zero,
        "memory_reserved": _zero,
        # The generator that CPU operations draw from is the default one.
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
        "manual_seed": _seed_default_generator,
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    # ``Module.cuda`` would initialize CUDA before it touches a tensor.
    torch.nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign]


def _seed_default_generator(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _replace_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm

    # Megatron's own setters queue their work until CUDA is initialized, which never happens.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # The stock fork warns whenever the CPU generator moves, which here is its very purpose.
    random.CudaRNGStatesTracker.fork = _fork
    # The stock wrapper refuses sequence parallelism; there is no other norm without TE or Apex.
    torch_norm.WrappedTorchNorm.__new__ = SequenceParallelNorm.__new__
    # Megatron compiles a few activations; that needs a C++ compiler and reorders arithmetic.
    torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def _fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Draw from the tracked state ``name``, then return to the state before."""
    if name not in tracker.states_:
        raise KeyError(f"rng state {name} is not added")
    before = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)


class SequenceParallelNorm:
    """torch's LayerNorm or RMSNorm with parameters marked for sequence parallelism.

    Takes what ``WrappedTorchNorm`` takes and builds the same module with the same names.
    Megatron sums the gradients of marked parameters over the tensor-parallel ranks.
    """

    def __new__(
        cls, config: Any, hidden_size: int, eps: float = 1e-5, *args: Any, **kwargs: Any
    ) -> Any:
        """Build the norm that ``config.normalization`` names over ``hidden_size`` features."""
        norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in norms or config.layernorm_zero_centered_gamma:
            raise ValueError(
                f"model.normalization={config.normalization} with layernorm_zero_centered_gamma="
                f"{config.layernorm_zero_centered_gamma} needs Transformer Engine; on CPU use "
                f"one of {', '.join(norms)} without zero-centered gamma"
            )
        norm = norms[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
