"""The helper processes of Megatron's ``torch_dist`` saves: none outlives the process it serves."""

from __future__ import annotations

import multiprocessing
from multiprocessing.managers import SyncManager
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async

from nemo_uneven_tp import processes


def end_with_this_process() -> None:
    """Have writers, and the server that collects their results, end with this process.

    Safe to call more than once.
    """
    processes.forked_children_die_with_us()
    filesystem_async._get_write_results_queue = _results_queue


def _results_queue() -> Any:
    """As Megatron's function of this purpose, with a server that ends with this process."""
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        manager.start(processes.die_with_parent)
        filesystem_async._results_queue = manager.Queue()
    return filesystem_async._results_queue
