"""Real processes for tests: a pool of ranks that many cases share.

Each case runs ``function(**kwargs)`` on ranks ``0 .. world_size - 1`` of a fresh gloo process
group with a file rendezvous (no ports). A child's traceback is raised in the parent. A hang
ends with a message after ``timeout_s``, and the pool is then started anew.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "megatron.core.models.gpt.gpt_model", "megatron.core.optimizer"]


class RankFailure(AssertionError):
    """One or more ranks of a case failed; carries their tracebacks."""


class RankPool:
    """Processes that wait for cases, started as they are needed."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *,
        timeout_s: float = 120.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``function`` on every rank and return what each returned.

        Raises:
            RankFailure: if a rank raised, died or did not finish in time.
        """
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        folder = tempfile.mkdtemp(prefix="ranks-")
        name = (function.__module__, function.__qualname__)
        connections = [connection for _, connection in self._workers[:world_size]]
        for rank, connection in enumerate(connections):
            connection.send((name, rank, world_size, folder, timeout_s, kwargs))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        # Once one rank has failed, its peers get a moment to report rather than the full time.
        while len(results) + len(failures) < world_size:
            left = [c for r, c in enumerate(connections) if r not in results and r not in failures]
            ready = wait(left, timeout=5.0 if failures else timeout_s)
            if not ready:
                missing = [connections.index(c) for c in left]
                failures.update({rank: "did not finish in time" for rank in missing})
                break
            for rank, connection in enumerate(connections):
                if connection not in ready:
                    continue
                try:
                    ok, value = connection.recv()
                except EOFError:
                    ok, value = False, "the process died"
                (results if ok else failures)[rank] = value
        if failures:
            self.close()
            raise RankFailure(
                "\n".join(f"rank {r}: {text}" for r, text in sorted(failures.items()))
            )
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """End all processes."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join(10)
        self._workers = []


def _serve(connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import faulthandler

    import torch

    torch.set_num_threads(1)
    while True:
        try:
            (module, qualname), rank, world_size, folder, timeout_s, kwargs = connection.recv()
        except EOFError:
            return
        try:
            function = getattr(importlib.import_module(module), qualname)
            faulthandler.dump_traceback_later(timeout_s)  # a hang shows where, on stderr
            connection.send((True, _run(function, rank, world_size, folder, timeout_s, kwargs)))
        except BaseException:  # noqa: BLE001 - everything goes to the parent
            connection.send((False, traceback.format_exc()))
        faulthandler.cancel_dump_traceback_later()


def _run(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    timeout_s: float,
    kwargs: dict[str, Any],
) -> Any:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'rendezvous'}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        result = function(**kwargs)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()
