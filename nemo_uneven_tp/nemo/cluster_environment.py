"""A Lightning cluster environment that knows only the living ranks.

Wraps the one Lightning chose (torchrun, Slurm, ...). The processes of failed ranks leave when
it is made, which is when the ``Trainer`` is built: before any logger or process group.
"""

from __future__ import annotations

from lightning.fabric.plugins.environments import ClusterEnvironment

from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.ranks import enter_compact_ranks
from nemo_uneven_tp.topology import Topology


class UnevenClusterEnvironment(ClusterEnvironment):
    """Compact ranks over ``base``.

    ``trainer.devices`` and ``num_nodes`` stay nominal, so the check that they match the number
    of processes is left out. Local ranks stay nominal: they select the device.
    """

    def __init__(self, base: ClusterEnvironment, topology: Topology) -> None:
        super().__init__()
        self.base = base
        self.topology = topology
        if base.creates_processes_externally:
            enter_compact_ranks(topology)
        elif topology.failed_ranks:
            raise UserError(
                f"uneven_tp.failed_ranks={list(topology.failed_ranks)} needs processes started by "
                "torchrun, Slurm or `uneven-tp pretrain`; Lightning's own launcher can't leave "
                "ranks out"
            )

    @property
    def creates_processes_externally(self) -> bool:
        """As in the wrapped environment."""
        return self.base.creates_processes_externally

    @property
    def main_address(self) -> str:
        """Address of the rendezvous store."""
        return self.base.main_address

    @property
    def main_port(self) -> int:
        """Port of the rendezvous store."""
        return self.base.main_port

    @staticmethod
    def detect() -> bool:
        """Never chosen by itself."""
        return False

    def world_size(self) -> int:
        """Number of living ranks."""
        return self.topology.world_size

    def set_world_size(self, size: int) -> None:
        """Nothing: the plan decides."""

    def global_rank(self) -> int:
        """Compact rank."""
        return self.base.global_rank()

    def set_global_rank(self, rank: int) -> None:
        """Nothing where a launcher numbers the processes."""
        if not self.base.creates_processes_externally:
            self.base.set_global_rank(rank)

    def local_rank(self) -> int:
        """Nominal local rank, which selects the device."""
        return self.base.local_rank()

    def node_rank(self) -> int:
        """Node of this process."""
        return self.base.node_rank()

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Nothing: devices x nodes is nominal, the number of processes is not."""

    def teardown(self) -> None:
        """As in the wrapped environment."""
        self.base.teardown()
