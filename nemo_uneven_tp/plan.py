"""The plan: who holds what, who meets whom, who computes how much (pure data).

A :class:`Plan` is the whole answer to "these ranks failed, how do we go on": cells, shares,
sync groups and micro-batches per replica. It is made by :mod:`nemo_uneven_tp.planner`
without a process group, is the same on every rank, and travels as JSON.

Words: **cell** (replica r, stage p): the ranks that hold stage p of replica r. **Nominal
rank**: a rank's number in the stock, undamaged layout; **compact rank**: its number among
the living. **Sync group**: the ranks, one per replica, that own the same segments of a stage.
Embedding and output weights that are tied but lie in different stages are one tensor: their
segments have an owner in both stages of every replica.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.model_shape import ModelShape, StageLayers
from nemo_uneven_tp.shares import Axis, Boundaries, cut_points, owner_index

PLAN_FORMAT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One data-parallel replica x one pipeline stage.

    ``ranks`` are compact, ``nominal_ranks`` the same processes in the stock numbering,
    both in tensor-parallel order. ``shares`` holds ``degree + 1`` boundaries per axis.
    ``speeds`` are relative to a nominal rank's, 1; empty if nothing is known of them.
    """

    replica: int
    nominal_replica: int
    stage: int
    ranks: tuple[int, ...]
    nominal_ranks: tuple[int, ...]
    shares: Mapping[Axis, Boundaries]
    speeds: tuple[float, ...] = ()

    @property
    def degree(self) -> int:
        """Tensor-parallel degree of the cell."""
        return len(self.ranks)

    def speed(self, tp_rank: int) -> float:
        """Relative speed of tensor-parallel rank ``tp_rank`` of the cell."""
        return self.speeds[tp_rank] if self.speeds else 1.0

    def share(self, axis: Axis, tp_rank: int) -> range:
        """The units of ``axis`` that tensor-parallel rank ``tp_rank`` of the cell owns."""
        boundaries = self.shares[axis]
        return range(boundaries[tp_rank], boundaries[tp_rank + 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Units ``[start, stop)`` of ``axis``; ``owners[r]`` is their compact rank in replica r.

    The vocabulary of tied embeddings that lie in different stages has two owners per replica:
    first those of the first stage in replica order, then those of the last.
    """

    axis: Axis
    start: int
    stop: int
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGroup:
    """The ranks, in the order of the segments' owners, that own ``segments`` together."""

    ranks: tuple[int, ...]
    segments: tuple[Segment, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Cells, shares, sync groups and micro-batches of one job; see the module docstring.

    ``vocab_size`` is the stock padded vocabulary at ``reference_tensor_parallel_size``, the
    undamaged layout whose vocabulary and initial weights the run reproduces.
    ``micro_batches[r]`` is the number of micro-batches replica r computes per global batch.
    ``cells`` is in the order of compact ranks: all replicas of stage 0, then of stage 1, ...
    """

    model: ModelShape
    tensor_model_parallel_size: int
    nominal_world_size: int
    failed_ranks: tuple[int, ...]
    dropped_replicas: tuple[int, ...]
    cells: tuple[Cell, ...]
    vocab_size: int
    reference_tensor_parallel_size: int
    micro_batch_size: int
    global_batch_size: int
    micro_batches: tuple[int, ...]
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    format: int = field(default=PLAN_FORMAT)

    @cached_property
    def world_size(self) -> int:
        """Number of living ranks."""
        return sum(cell.degree for cell in self.cells)

    @property
    def replicas(self) -> int:
        """Number of living data-parallel replicas."""
        return len(self.cells) // self.stages

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pipeline_model_parallel_size

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degree of each cell; with one stage, of each replica."""
        return tuple(cell.degree for cell in self.cells)

    @property
    def degree_table(self) -> list[int] | list[list[int]]:
        """Degrees as ``uneven_tp.degrees`` takes them: per replica, with stages a row each."""
        if self.stages == 1:
            return list(self.degrees)
        return [
            [self.cell(replica, stage).degree for stage in range(self.stages)]
            for replica in range(self.replicas)
        ]

    def cell(self, replica: int, stage: int = 0) -> Cell:
        """The cell of stage ``stage`` of replica ``replica``."""
        return self.cells[stage * self.replicas + replica]

    def cells_of_stage(self, stage: int) -> tuple[Cell, ...]:
        """The cells of a stage, in replica order."""
        return self.cells[stage * self.replicas : (stage + 1) * self.replicas]

    def cells_of_replica(self, replica: int) -> tuple[Cell, ...]:
        """The cells of a replica, in stage order."""
        return self.cells[replica :: self.replicas]

    def layers(self, stage: int) -> StageLayers:
        """Which layers stage ``stage`` holds, and whether embedding and output are there."""
        return self.model.stage_layers(
            stage, self.stages, self.virtual_pipeline_model_parallel_size or 1
        )

    @property
    def has_stock_pipeline(self) -> bool:
        """Whether stock Megatron can pass activations between stages: equal shapes everywhere."""
        padded = self.sequence_parallel and self.model.seq_length % self.cells[0].degree
        return self.same_shares and not padded

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The first stage of every two that exchange activations.

        With several model chunks per stage, the last one hands on to stage 0.
        """
        around = self.stages > 1 and (self.virtual_pipeline_model_parallel_size or 1) > 1
        return tuple(range(self.stages if around else self.stages - 1))

    @property
    def ties_stages(self) -> bool:
        """Whether the tied embedding and output weights lie in different stages."""
        return self.stages > 1 and self.model.share_embeddings_and_output_weights

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the whole global batch."""
        return self.global_batch_size // self.micro_batch_size

    @property
    def is_uniform(self) -> bool:
        """Whether all cells are alike, so that stock gradient sync is exact and enough."""
        return self.same_shares and len(set(self.micro_batches)) == 1

    @property
    def same_shares(self) -> bool:
        """Whether all cells cut every axis alike: rank i of each has the same share."""
        return all(cell.shares == self.cells[0].shares for cell in self.cells)

    @cached_property
    def distinct_cells(self) -> tuple[Cell, ...]:
        """One cell of each way to cut the axes."""
        return tuple({tuple(cell.shares.items()): cell for cell in self.cells}.values())

    @cached_property
    def _locations(self) -> dict[int, tuple[Cell, int]]:
        return {
            rank: (cell, tp_rank) for cell in self.cells for tp_rank, rank in enumerate(cell.ranks)
        }

    @cached_property
    def _compact_ranks(self) -> dict[int, int]:
        return {
            nominal: rank
            for cell in self.cells
            for nominal, rank in zip(cell.nominal_ranks, cell.ranks, strict=True)
        }

    def location(self, rank: int) -> tuple[Cell, int]:
        """The cell of compact rank ``rank`` and its tensor-parallel rank in it."""
        return self._locations[rank]

    def compact_rank(self, nominal_rank: int) -> int | None:
        """The compact rank of a nominal one; ``None`` if it is not part of the job."""
        return self._compact_ranks.get(nominal_rank)

    def nominal_rank(self, rank: int) -> int:
        """The nominal rank of a compact one: the number users know it by."""
        cell, tp_rank = self.location(rank)
        return cell.nominal_ranks[tp_rank]

    def leaders(self, stage: int = 0) -> tuple[int, ...]:
        """The first rank of each cell of a stage, in replica order.

        Replicated parameters of the stage meet here.
        """
        return tuple(cell.ranks[0] for cell in self.cells_of_stage(stage))

    def units(self, axis: Axis) -> int:
        """How many units ``axis`` has."""
        return self.model.units(axis, self.vocab_size)

    @cached_property
    def _segments(self) -> dict[tuple[Axis, int], tuple[Segment, ...]]:
        last = self.stages - 1
        found = {
            (axis, stage): _cut(axis, self.cells_of_stage(stage))
            for stage in range(self.stages)
            for axis in Axis
            if axis is not Axis.VOCAB or stage in (0, last)
        }
        if self.ties_stages:
            tied = _cut(Axis.VOCAB, self.cells_of_stage(0) + self.cells_of_stage(last))
            found[Axis.VOCAB, 0] = found[Axis.VOCAB, last] = tied
        return found

    def segments(self, axis: Axis, stage: int = 0) -> tuple[Segment, ...]:
        """The segments of ``axis`` in a stage, in order; together they cover its units once.

        None for the vocabulary in stages that hold neither embedding nor output.
        """
        return self._segments.get((axis, stage), ())

    def owner(self, segment: Segment, cell: Cell) -> int:
        """The compact rank of ``cell`` that owns ``segment`` of its stage."""
        tied = len(segment.owners) > self.replicas and cell.stage > 0
        return segment.owners[cell.replica + (self.replicas if tied else 0)]

    @cached_property
    def sync_groups(self) -> tuple[SyncGroup, ...]:
        """Every sync group once, in one order that is the same on all ranks.

        Per stage, at most one per distinct share boundary, plus the leaders' group, which is
        the first of its stage: it also carries the replicated parameters (with no segments if
        none belong to it).
        """
        by_ranks: dict[tuple[int, ...], list[Segment]] = {}
        for stage in range(self.stages):
            by_ranks.setdefault(self.leaders(stage), [])
            for axis in Axis:
                if axis is Axis.VOCAB and stage > 0 and self.ties_stages:
                    continue  # the first stage's segments are those of the last, too
                for segment in self.segments(axis, stage):
                    by_ranks.setdefault(segment.owners, []).append(segment)
        return tuple(
            SyncGroup(ranks=ranks, segments=tuple(segments)) for ranks, segments in by_ranks.items()
        )

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the JSON form: equal on two ranks exactly if their plans are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as written to ``plan.json`` (derived groups are left out)."""
        return asdict(self)

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON, keys sorted."""
        return json.dumps(self.to_dict(), sort_keys=True, indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Rebuild a plan from :meth:`to_dict`.

        Raises:
            UserError: if the data is not a plan of this format.
        """
        if not isinstance(data, Mapping) or data.get("format") != PLAN_FORMAT:
            raise UserError(
                f"plan.json: not a plan of format {PLAN_FORMAT}; make it again with this version"
            )
        try:
            cells = tuple(
                Cell(
                    **{
                        **cell,
                        "ranks": tuple(cell["ranks"]),
                        "nominal_ranks": tuple(cell["nominal_ranks"]),
                        "shares": {Axis(a): tuple(b) for a, b in cell["shares"].items()},
                        "speeds": tuple(cell.get("speeds", ())),
                    }
                )
                for cell in data["cells"]
            )
            tuples = {
                name: tuple(data[name])
                for name in ("failed_ranks", "dropped_replicas", "micro_batches")
            }
            return cls(
                **{**data, **tuples, "cells": cells, "model": ModelShape(**data["model"])},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"plan.json: damaged ({error}); make it again") from error

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Rebuild a plan from :meth:`to_json`.

        Raises:
            UserError: if the text is not JSON or not a plan of this format.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"plan.json: not JSON ({error}); make it again") from error
        return cls.from_dict(data)


def _cut(axis: Axis, cells: Sequence[Cell]) -> tuple[Segment, ...]:
    """The segments of ``axis`` over ``cells``, with one owner in each of them."""
    distinct: dict[Boundaries, list[Cell]] = {}
    for cell in cells:
        distinct.setdefault(cell.shares[axis], []).append(cell)
    found = []
    for start, stop in cut_points(list(distinct)):
        index = {b: owner_index(b, start) for b in distinct}
        owners = tuple(cell.ranks[index[cell.shares[axis]]] for cell in cells)
        found.append(Segment(axis=axis, start=start, stop=stop, owners=owners))
    return tuple(found)
