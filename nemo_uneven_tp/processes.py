"""Processes that end when they should: helpers with their worker, leftovers with their launch.

Saving a checkpoint forks writers, asynchronous saving processes that fork them. A worker that
is killed leaves them behind, writing. Two nets: the kernel kills a helper when its parent ends
(``PR_SET_PDEATHSIG``), and a launcher adopts what its workers leave behind
(``PR_SET_CHILD_SUBREAPER``) and kills it. Linux only; elsewhere nothing is done. Standard
library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36

_hooked = False
_forking_parent: int | None = None


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent's thread that started it ends.

    Args:
        parent: the parent's process id if known; if that one has ended already, so does this one.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and sys.platform == "linux" and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def forked_children_die_with_us() -> None:
    """Have every process forked from now on, and those it forks, end with its parent.

    Processes forked by other threads than the main one are left alone, since they would end
    with that thread.
    """
    global _hooked
    if not _hooked:
        _hooked = True
        os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def _before_fork() -> None:
    global _forking_parent
    main = threading.current_thread() is threading.main_thread()
    _forking_parent = os.getpid() if main else None


def _after_fork() -> None:
    if _forking_parent is not None:
        die_with_parent(_forking_parent)


def become_subreaper() -> None:
    """Adopt the orphans among this process's descendants, rather than leave them to init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def helpers() -> set[int]:
    """Processes that Python's ``multiprocessing`` keeps for this one."""
    servers = (
        getattr(getattr(forkserver, "_forkserver", None), "_forkserver_pid", None),
        getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None),
    )
    return {pid for pid in servers if pid is not None}


def kill_descendants(spare: Collection[int] = (), timeout_s: float = 5.0) -> list[int]:
    """Kill all that descends from this process, wait until it is gone, return what was killed.

    Complete only after :func:`become_subreaper`.

    Args:
        spare: processes to leave alone; what descends from them is not.
    """
    killed: set[int] = set()
    end = time.monotonic() + timeout_s
    while left := [pid for pid in descendants() if pid not in spare]:
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):  # a grandchild: ours once its parent is gone
                os.waitpid(pid, os.WNOHANG)
        killed.update(left)
        if time.monotonic() > end:
            break
        time.sleep(0.01)
    return sorted(killed)


def descendants(pid: int | None = None) -> list[int]:
    """Process ids below ``pid`` (default: this process), unordered."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            parent = entry.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(entry.parent.name))
    found, todo = [], [os.getpid() if pid is None else pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
