"""Nominal ranks to compact ranks in a process's environment (pure).

The user's launch command stays as it is: it starts a process for every nominal rank.
:func:`enter_compact_ranks` ends the processes of failed ranks with exit code 0 and renumbers
the others, before any process group exists. Local ranks stay nominal: they select the GPU.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.topology import Topology

NOMINAL_RANK = "UNEVEN_TP_NOMINAL_RANK"
NOMINAL_WORLD_SIZE = "UNEVEN_TP_NOMINAL_WORLD_SIZE"

_LAUNCHERS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"))
"""Variables for rank and world size: torchrun's (and torch's own), then Slurm's."""


def launched(environment: MutableMapping[str, str] | None = None) -> bool:
    """Whether a launcher has numbered this process.

    One Slurm task alone is an interactive shell as likely as a job: not counted.
    """
    env = os.environ if environment is None else environment
    if "RANK" in env and "WORLD_SIZE" in env:
        return True
    return "SLURM_PROCID" in env and env.get("SLURM_NTASKS", "1") != "1"


def nominal_rank(environment: MutableMapping[str, str] | None = None) -> int:
    """This process's rank in the stock layout.

    Raises:
        KeyError: if no launcher has numbered it.
    """
    env = os.environ if environment is None else environment
    if NOMINAL_RANK in env:
        return int(env[NOMINAL_RANK])
    for rank, size in _LAUNCHERS:
        if rank in env and size in env:
            return int(env[rank])
    raise KeyError("no launcher has set RANK or SLURM_PROCID")


def nominal_world_size(environment: MutableMapping[str, str] | None = None) -> int:
    """The number of processes the launcher started, those of failed ranks included.

    Raises:
        KeyError: if no launcher has numbered this process.
    """
    env = os.environ if environment is None else environment
    if NOMINAL_WORLD_SIZE in env:
        return int(env[NOMINAL_WORLD_SIZE])
    for rank, size in _LAUNCHERS:
        if rank in env and size in env:
            return int(env[size])
    raise KeyError("no launcher has set WORLD_SIZE or SLURM_NTASKS")


def enter_compact_ranks(
    topology: Topology, environment: MutableMapping[str, str] | None = None
) -> None:
    """Leave quietly if this rank failed, else take its compact rank. Safe to call twice.

    Raises:
        SystemExit: with code 0, on a rank that is not part of the job.
        UserError: if the launcher started another number of processes than the config says.
    """
    env = os.environ if environment is None else environment
    rank, size = nominal_rank(env), nominal_world_size(env)
    if size != topology.nominal_world_size:
        raise UserError(
            f"trainer.devices * trainer.num_nodes={topology.nominal_world_size}, but the launcher "
            f"started {size} processes; make both the nominal number, failed ranks included"
        )
    compact = topology.compact_rank(rank)
    if compact is None:
        raise SystemExit(0)
    env[NOMINAL_RANK] = str(rank)
    env[NOMINAL_WORLD_SIZE] = str(size)
    for rank_name, size_name in _LAUNCHERS:
        if rank_name in env and size_name in env:
            env[rank_name] = str(compact)
            env[size_name] = str(topology.world_size)
