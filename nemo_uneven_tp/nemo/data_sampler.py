"""The data sampler: the stock order of samples, unequal numbers of micro-batches per replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.core import num_microbatches_calculator as calculator
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from torch.utils.data import DataLoader, Sampler

from nemo_uneven_tp.batch import assign_micro_batches
from nemo_uneven_tp.errors import UnsupportedError
from nemo_uneven_tp.plan import Plan


class UnevenPretrainingSampler(Sampler[list[int]]):
    """Yields this replica's micro-batches of every global batch, as lists of sample indices.

    Global batch k is samples ``[k * gbs, (k + 1) * gbs)``, as in Megatron's sampler. An
    incomplete last global batch is left out, since replicas must take equally many steps.
    """

    def __init__(self, plan: Plan, replica: int, total_samples: int, consumed_samples: int) -> None:
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.global_batch_size = plan.global_batch_size
        self.micro_batch_size = plan.micro_batch_size
        self.micro_batches = assign_micro_batches(plan.micro_batches)[replica]

    def __len__(self) -> int:
        """Micro-batches of one pass over all samples, as Megatron's sampler counts."""
        return self.total_samples // self.global_batch_size * len(self.micro_batches)

    def __iter__(self) -> Iterator[list[int]]:
        start = self.consumed_samples
        while start + self.global_batch_size <= self.total_samples:
            for index in self.micro_batches:
                first = start + index * self.micro_batch_size
                yield list(range(first, first + self.micro_batch_size))
            start += self.global_batch_size


class UnevenDataSampler(MegatronDataSampler):
    """NeMo's data sampler over a plan; takes over the settings of a stock one."""

    def __init__(self, plan: Plan, replica: int, stock: MegatronDataSampler) -> None:
        if stock.rampup_batch_size is not None:
            raise UnsupportedError(
                f"data.rampup_batch_size={stock.rampup_batch_size} is not supported by uneven "
                "tensor parallelism; leave it out or use uneven_tp=off"
            )
        if stock.dataloader_type != "single":
            raise UnsupportedError(
                f"data.dataloader_type={stock.dataloader_type} depends on the number of ranks, "
                "which changes here; set it to single or use uneven_tp=off"
            )
        super().__init__(
            seq_len=stock.seq_len,
            micro_batch_size=stock.micro_batch_size,
            global_batch_size=stock.global_batch_size,
            dataloader_type=stock.dataloader_type,
            init_consumed_samples=stock.init_consumed_samples,
            init_global_step=stock.init_global_step,
            output_log=stock.output_log,
            decoder_seq_len=stock.decoder_seq_len,
        )
        self.plan = plan
        self.replica = replica

    def setup(self, global_rank: int) -> None:
        """Set Megatron's number of micro-batches to this replica's."""
        if calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:  # noqa: SLF001 - as NeMo does
            calculator.init_num_microbatches_calculator(
                rank=global_rank,
                rampup_batch_size=None,
                global_batch_size=self.global_batch_size,
                micro_batch_size=self.micro_batch_size,
                data_parallel_size=1,
                decrease_batch_size_if_needed=False,
            )
        # Megatron derives the number from equal replicas; there is no other door.
        current = calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR  # noqa: SLF001
        current.num_micro_batches = self.plan.micro_batches[self.replica]

    def transform_dataloader(self, dataloader: DataLoader, consumed_samples: int = 0) -> DataLoader:
        """Put this replica's sampler into ``dataloader``."""
        training = getattr(dataloader, "mode", "train") == "train"
        options: dict[str, Any] = {
            name: getattr(dataloader, name)
            for name in ("num_workers", "pin_memory", "persistent_workers", "collate_fn")
        }
        sampler = UnevenPretrainingSampler(
            self.plan,
            self.replica,
            len(dataloader.dataset),  # type: ignore[arg-type]
            self.init_consumed_samples if training else 0,
        )
        return DataLoader(dataloader.dataset, batch_sampler=sampler, **options)

    def compute_consumed_samples(self, steps_since_resume: int = 0) -> int:
        """Samples all replicas have consumed together."""
        return self.init_consumed_samples + steps_since_resume * self.global_batch_size
