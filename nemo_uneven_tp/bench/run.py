"""Counts and times of a configuration, as one report.

A configuration that fits this machine is run: real processes on CPU over the loopback
interface, real steps, counted on the wire. A larger one is counted from its plan.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from nemo_uneven_tp.bench.counts import (
    RankCounts,
    Settings,
    model_elements,
    rank_counts,
    reshard_first_counts,
    step_flops,
    summary,
)
from nemo_uneven_tp.config.request import plan_request
from nemo_uneven_tp.errors import UserError
from nemo_uneven_tp.layout_options import LayoutOptions
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.planner import make_plan, stock_layout_exists

NOOP_PAIRS = 61
SYNC_ROUNDS = 15
CHECKPOINT_ROUNDS = 7
MAX_PROCESSES = 16
MAX_STEP_FLOPS = 2e11
"""What two CPU cores do in a few seconds."""
_BYTES_PER_ELEMENT = 48
"""Two models at once, each with gradients, main parameters, two moments; a guess, generous."""
RANKS_MODULE = "nemo_uneven_tp.bench.ranks"

Report = dict[str, Any]


def bench(config: dict[str, Any], plan: Plan, *, counts_only: bool) -> Report:
    """The report of a checked configuration and its plan.

    Raises:
        UserError: if times are asked for that can't be measured on this machine.
    """
    settings = settings_of(config)
    too_big = why_too_big(config, plan)
    if too_big and not counts_only:
        raise UserError(f"{too_big}; add --counts-only to compute its counts from the plan")
    computed = rank_counts(plan, settings)
    measured, times = (None, {}) if too_big else _measure(config, plan, counts_only)
    ranks = computed if measured is None else _with_measured(computed, measured)
    report: Report = {
        "name": config["name"],
        "counts": "computed" if measured is None else "measured",
        "why_computed": too_big,
        "degrees": plan.degree_table,
        "micro_batches": list(plan.micro_batches),
        "settings": asdict(settings),
        **summary(plan, settings, ranks),
        "noop_step_time_ratio": None,
        "noop_pairs": 0,
        **times,
    }
    if measured is not None:
        for rank, extra in zip(report["ranks"], measured, strict=True):
            rank["collectives"] = extra["collectives"]
    peer = times.get("reshard_first", {"step_time_ratio_to_segments": None})
    report["reshard_first"] = {**asdict(reshard_first_counts(plan, settings)), **peer}
    return report


def settings_of(config: dict[str, Any]) -> Settings:
    """Element sizes and switches; recipes as NeMo's are, unless told otherwise."""
    if "recipe" in config:
        return Settings(parameter_bytes=2, gradient_bytes=4, use_distributed_optimizer=True)
    strategy, optim = config["strategy"], config["optim"]
    parameter_bytes = 4 if str(config["trainer"]["precision"]) == "32" else 2
    return Settings(
        parameter_bytes=parameter_bytes,
        gradient_bytes=4 if strategy["grad_reduce_in_fp32"] else parameter_bytes,
        use_distributed_optimizer=optim["use_distributed_optimizer"],
        overlap_grad_reduce=strategy["overlap_grad_reduce"],
        bucket_size=strategy["bucket_size"],
        optimizer=optim["optimizer"],
    )


def why_too_big(config: dict[str, Any], plan: Plan) -> str | None:
    """Why this machine can't run the configuration, ``None`` if it can."""
    if "recipe" in config:
        return f"recipe.name={config['recipe']['name']} is not built here without NeMo and GPUs"
    processes = plan.nominal_world_size
    if processes > MAX_PROCESSES:
        return f"{processes} processes are more than the {MAX_PROCESSES} that are started here"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    replicas = processes // plan.tensor_model_parallel_size
    if model_elements(plan) * replicas * _BYTES_PER_ELEMENT > memory / 2:
        return f"{replicas} replicas of the model do not fit this machine's memory"
    if step_flops(plan) > MAX_STEP_FLOPS:
        return f"a step takes {step_flops(plan):.0e} floating-point operations, too many for CPUs"
    return None


def undamaged_plan(config: dict[str, Any]) -> Plan:
    """The plan of the same job with nothing failed, one micro-batch in each replica.

    One, because what could cost time happens once a step: with more it would weigh less.
    """
    request = replace(plan_request(config), failed_ranks=(), degrees=None)
    replicas = request.world_size // request.tensor_model_parallel_size
    whole = replicas * request.micro_batch_size
    # The stock vocabulary, as the stock model it is compared with has it.
    return make_plan(replace(request, global_batch_size=whole, reference_tensor_parallel_size=None))


def stock_peer(config: dict[str, Any], plan: Plan) -> Plan:
    """The plan of stock Megatron with the same model on as many ranks, at its largest degree."""
    request = plan_request(config)
    ranks, model = plan.world_size, request.model
    degree = max(
        degree
        for degree in range(1, request.tensor_model_parallel_size + 1)
        if ranks % degree == 0 and (degree == 1 or stock_layout_exists(model, degree))
    )
    return make_plan(
        replace(
            request,
            tensor_model_parallel_size=degree,
            world_size=ranks,
            failed_ranks=(),
            degrees=None,
            sequence_parallel=False,
            options=LayoutOptions(),
            global_batch_size=ranks // degree * request.micro_batch_size,
            reference_tensor_parallel_size=plan.reference_tensor_parallel_size,
        )
    )


def _measure(
    config: dict[str, Any], plan: Plan, counts_only: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    from nemo_uneven_tp.launch import launch

    task: dict[str, Any] = {"config": config, "plan": plan.to_dict(), "undamaged": None}
    task |= {"pairs": NOOP_PAIRS, "rounds": SYNC_ROUNDS, "checkpoint_rounds": CHECKPOINT_ROUNDS}
    if not counts_only:
        task["undamaged"] = undamaged_plan(config).to_dict()
        task["peer"] = stock_peer(config, plan).to_dict()
    folder = Path(tempfile.mkdtemp(prefix="uneven-tp-bench-"))
    (folder / "task.json").write_text(json.dumps(task))
    sys.stderr.write(f"Starting {plan.nominal_world_size} processes on this machine ...\n")
    launch(folder, plan.nominal_world_size, "cpu", 1, module=RANKS_MODULE)
    found = [
        json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(plan.world_size)
    ]
    shutil.rmtree(folder)  # kept when something failed: the log in it is named in the error
    return [rank["counts"] for rank in found], found[0]["times"]


def _with_measured(computed: list[RankCounts], measured: list[dict[str, Any]]) -> list[RankCounts]:
    names = {field.name for field in fields(RankCounts)}
    return [
        replace(counts, **{k: v for k, v in real.items() if k in names})
        for counts, real in zip(computed, measured, strict=True)
    ]
