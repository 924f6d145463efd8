"""The order of samples over layouts: what is fed is 0, 1, 2, ... whoever reads and hands over."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nemo.lightning")

from megatron.core import num_microbatches_calculator as calculator
from nemo import lightning as nl
from nemo.collections.llm.gpt.data.pre_training import PreTrainingDataModule
from nemo.lightning.data import add_megatron_sampler
from nemo.lightning.pytorch.plugins import MegatronDataSampler
from nemo.utils import AppState
from torch.utils.data import DataLoader

from nemo_uneven_tp.nemo.data_sampler import UnevenDataSampler
from nemo_uneven_tp.planner import PlanRequest, make_plan
from tests.dist.test_checkpoint_layouts import llama_like

GLOBAL_BATCH, MICRO_BATCH, SAMPLES = 12, 2, 400
LAYOUTS: list[tuple[int, ...] | int] = [(2, 1), (4, 3, 1), (1, 2, 4, 3, 2), (3,), 1, 2, 3, 6]
"""Degrees of uneven layouts; numbers of replicas of stock ones."""


def stock_sampler() -> MegatronDataSampler:
    """What NeMo's data module makes."""
    return MegatronDataSampler(
        seq_len=8, micro_batch_size=MICRO_BATCH, global_batch_size=GLOBAL_BATCH, output_log=False
    )


def loader_of(dataset: list[int]) -> DataLoader:
    """A loader as NeMo's data module hands it to the sampler."""
    return DataLoader(dataset, collate_fn=list)  # type: ignore[arg-type]


class Replica:
    """One replica's data sampler and loader in a layout, resumed from ``state``."""

    def __init__(self, layout: tuple[int, ...] | int, number: int, state: dict[str, Any] | None):
        calculator.unset_num_microbatches_calculator()
        self.sampler = stock_sampler()
        self.replicas = layout if isinstance(layout, int) else len(layout)
        if not isinstance(layout, int):
            nominal = max(layout)
            request = PlanRequest(
                model=llama_like(),
                tensor_model_parallel_size=nominal,
                world_size=nominal * len(layout),
                global_batch_size=GLOBAL_BATCH,
                micro_batch_size=MICRO_BATCH,
                degrees=layout,
            )
            self.sampler = UnevenDataSampler(make_plan(request), number, self.sampler)
        AppState().data_parallel_size = self.replicas
        self.sampler.setup(1)  # as a rank that logs nothing
        self.trainer = SimpleNamespace(
            strategy=nl.MegatronStrategy.__new__(nl.MegatronStrategy), global_step=0
        )
        self.sampler.trainer = self.trainer
        self.module = SimpleNamespace(
            data_sampler=self.sampler, trainer=self.trainer, init_global_step=0
        )
        if state is not None:
            PreTrainingDataModule.load_state_dict(self.module, state)
        dataset = list(range(SAMPLES))
        if isinstance(layout, int):  # as MegatronDataSampler, which asks Megatron for the rank
            loader = add_megatron_sampler(
                loader_of(dataset),
                micro_batch_size=MICRO_BATCH,
                global_batch_size=GLOBAL_BATCH,
                consumed_samples=self.sampler.init_consumed_samples,
                rank=number,
                world_size=self.replicas,
            )
        else:
            loader = self.sampler.transform_dataloader(loader_of(dataset))
        self.micro_batches = iter(loader)
        self.count = calculator.get_num_microbatches()

    def step(self) -> list[int]:
        """The samples of this replica's part of a global batch."""
        return [sample for _ in range(self.count) for sample in next(self.micro_batches)]

    def state(self, steps: int) -> dict[str, Any]:
        """What a checkpoint keeps after ``steps`` since the last resume."""
        self.trainer.global_step = steps
        return PreTrainingDataModule.state_dict(self.module)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Leave NeMo's and Megatron's globals as they were."""
    before = AppState().data_parallel_size
    yield
    AppState().data_parallel_size = before
    calculator.unset_num_microbatches_calculator()


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_repeated_or_skipped(seed: int) -> None:
    """Parts of a job in layouts drawn at random, each going on from the state of the last."""
    rng = random.Random(seed)
    fed: list[list[int]] = []
    state = None
    for layout in rng.sample(LAYOUTS, 4):
        steps = rng.randint(1, 6)
        replicas = layout if isinstance(layout, int) else len(layout)
        batches: list[list[int]] = [[] for _ in range(steps)]
        for number in range(replicas):
            replica = Replica(layout, number, state)
            for batch in batches:
                batch += replica.step()
            left = replica.state(steps)
        fed += [sorted(batch) for batch in batches]
        state = left
    size = GLOBAL_BATCH
    assert fed == [list(range(k * size, (k + 1) * size)) for k in range(len(fed))]
    assert state == {"consumed_samples": len(fed) * size}
