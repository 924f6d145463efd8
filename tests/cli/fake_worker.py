"""Stands in for the worker: does on each rank what ``plan.json`` in the run folder says."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

from nemo_uneven_tp import failure
from nemo_uneven_tp.processes import die_with_parent


def main(run_dir: Path) -> int:
    """Run one rank."""
    rank = os.environ["RANK"]
    (run_dir / f"pid{rank}").write_text(str(os.getpid()))
    variables = ("MASTER_ADDR", "WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    (run_dir / f"env{rank}").write_text(json.dumps({name: os.environ[name] for name in variables}))
    todo = json.loads((run_dir / "todo.json").read_text()).get(rank, "")
    if rank == "0":
        print("step 1", flush=True)
    print(f"noise of rank {rank}", file=sys.stderr, flush=True)
    if todo == "sleep":
        time.sleep(120)
    others = int(os.environ["WORLD_SIZE"])
    while todo and len(list(run_dir.glob("pid*"))) < others:
        time.sleep(0.02)
    if todo == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if todo.startswith("exit"):
        _, code, sentence = todo.split(":", 2)
        if sentence:
            failure.report(sentence, int(code))
        return int(code)
    return 0


def enter(run_dir: str, variables: dict[str, str]) -> int:
    """As the real worker's."""
    die_with_parent(os.getppid())
    os.environ.update(variables)
    code = main(Path(run_dir))
    if code:
        os._exit(code)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
elif __name__ == "tests.cli.fake_worker" and not multiprocessing.parent_process():
    die_with_parent()  # the fork server, which imports this module
