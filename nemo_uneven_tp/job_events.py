"""What a launcher or supervisor writes to ``events.jsonl`` (see :mod:`nemo_uneven_tp.events`).

Imports neither torch nor NeMo.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_uneven_tp.events import ATTEMPT_VARIABLE, EVENTS_FILE, EventWriter, next_attempt
from nemo_uneven_tp.plan import Plan
from nemo_uneven_tp.text_files import resolve_text_files

_BEGINNING = 65536


def job_start(
    writer: EventWriter,
    config: Mapping[str, Any],
    plan: Plan,
    *,
    policy: str | None = None,
    t: float | None = None,
) -> None:
    """The job is started, or goes on after its launcher had ended.

    Args:
        policy: of the supervisor; ``None`` without one.
        t: when it began (``time.time()``); default: now.
    """
    writer.write(
        "job_start",
        t=t,
        name=config["name"],
        policy=policy,
        nominal_world_size=plan.nominal_world_size,
        tokens_per_step=plan.global_batch_size * plan.model.seq_length,
        fingerprint=fingerprint(config, plan),
        max_steps=config.get("trainer", {}).get("max_steps"),
    )


def attempt_start(
    writer: EventWriter,
    plan: Plan,
    *,
    policy: str | None = None,
    failed_ranks: Sequence[int] | None = None,
    t: float | None = None,
) -> None:
    """A launch begins.

    Args:
        failed_ranks: nominal ranks whose GPUs are out of service and not paid for; default: all
            that take no part. Healthy ranks that stand idle in a dropped replica don't belong here.
    """
    writer.write(
        "attempt_start",
        t=t,
        degrees=plan.degree_table,
        world_size=plan.world_size,
        nominal_world_size=plan.nominal_world_size,
        failed_ranks=list(plan.failed_ranks if failed_ranks is None else failed_ranks),
        plan=plan.digest,
        policy=policy,
    )


@dataclass
class Outcome:
    """How a launch ended, for ``attempt_end`` and ``job_end``."""

    reason: str = "finished"


@contextmanager
def recorded(
    run_dir: Path, config: Mapping[str, Any], plan: Plan, started: float | None = None
) -> Iterator[Outcome]:
    """Record a job that is launched once, without a supervisor, around its launch.

    The processes launched inside learn their attempt from the environment. Set ``reason`` of
    what is yielded where the launch fails without an exception; one that has a ``rank``, as
    ``WorkerFailedError``, is recorded as a failure.
    """
    path = run_dir / EVENTS_FILE
    before = os.environ.get(ATTEMPT_VARIABLE)
    outcome = Outcome()
    with EventWriter(path, attempt=next_attempt(path)) as writer:
        job_start(writer, config, plan, t=started)
        attempt_start(writer, plan)
        os.environ[ATTEMPT_VARIABLE] = str(writer.attempt)
        try:
            yield outcome
        except BaseException as error:
            outcome.reason = _reason(writer, error)
            raise
        finally:
            writer.write("attempt_end", reason=outcome.reason)
            writer.write("job_end", reason=outcome.reason)
            if before is None:
                del os.environ[ATTEMPT_VARIABLE]
            else:
                os.environ[ATTEMPT_VARIABLE] = before


def _reason(writer: EventWriter, error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if not hasattr(error, "rank"):
        return "failure"
    if error.rank is None:
        return "interrupted"  # told to stop
    code = getattr(error, "exit_code", None) or 0
    killed = code < 0
    writer.write(
        "failure",
        ranks=[error.rank],
        kind="killed" if killed else "exit",
        signal=-code if killed else None,
        exit_code=None if killed else code,
    )
    return "failure"


def fingerprint(config: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """What makes two runs the same job: model, batch and data, but no layout."""
    return {
        "model": asdict(plan.model),
        "batch": {
            "global_batch_size": plan.global_batch_size,
            "seq_length": plan.model.seq_length,
        },
        "data": _data(config),
    }


def _data(config: Mapping[str, Any]) -> dict[str, Any]:
    if "recipe" in config:
        recipe = config["recipe"]
        return {"recipe": recipe["name"], "overrides": str(recipe["overrides"].get("data"))}
    data = config["data"]
    return {
        "text": text_digest(resolve_text_files(data["paths"])),
        "tokenizer": str(data["tokenizer"]),
        "split": str(data["split"]),
        "seed": data["seed"],
    }


def text_digest(files: Iterable[Path]) -> str:
    """A digest of text files that is the same wherever they lie: names, sizes and beginnings."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            beginning = stream.read(_BEGINNING)
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(hashlib.sha256(beginning).digest())
    return digest.hexdigest()[:16]
