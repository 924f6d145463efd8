"""``uneven-tp bench``: bytes, memory and step time of a run, against bounds and peers."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence

_OWN_OPTIONS = ("--json", "--counts-only")


def bench(arguments: Sequence[str]) -> int:
    """Run the subcommand; ``--json`` and ``--counts-only`` may stand anywhere."""
    from nemo_uneven_tp.bench.run import bench as run
    from nemo_uneven_tp.cli.bench_report import report_text
    from nemo_uneven_tp.config.compose import compose
    from nemo_uneven_tp.config.request import plan_of, refuse_stages
    from nemo_uneven_tp.config.validate import checked

    composed = compose("uneven-tp bench", [a for a in arguments if a not in _OWN_OPTIONS])
    if composed is None:
        return 0
    config = checked(composed)
    plan = plan_of(config)
    refuse_stages(plan)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    from nemo_uneven_tp.launch import WorkerFailedError

    try:
        report = run(config, plan, counts_only="--counts-only" in arguments)
    except WorkerFailedError as error:
        sys.stderr.write(f"uneven-tp bench: {error}\n")
        return 1
    if "--json" in arguments:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(report_text(report))
    return 0
