"""Under Slurm's variables: the processes srun started, the failed one leaves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_uneven_tp import events

NTASKS = 4


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.timeout(400)
def test_slurm_numbers_the_processes(tmp_path: Path) -> None:
    """Rank 0 of 4 has failed: it ends with exit code 0, the others train."""
    run_dir = tmp_path / "run"
    overrides = ["uneven_tp.failed_ranks=[0]", "trainer.max_steps=2", "model.num_layers=2"]
    overrides += ["model.seq_length=64", f"run_dir={run_dir}"]
    command = [sys.executable, "-m", "nemo_uneven_tp", "pretrain", *overrides]
    common = {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "SLURM_NTASKS": str(NTASKS),
        "SLURM_NODEID": "0",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "interactive",
        "SLURM_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            command,
            env={**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NTASKS)
    ]
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * NTASKS, said
    assert said[0] == ("", "")
    steps = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [0, 1]
    assert json.loads((run_dir / "result.json").read_text())["replicas_equal"] is True
    found = events.read(run_dir / events.EVENTS_FILE).events
    starts = [e for e in found if e.event == "attempt_start"]
    assert [(e.rank, e.get("degrees"), e.get("failed_ranks")) for e in starts] == [
        (None, [1, 2], [0])
    ]
    assert {e.rank for e in found if e.event == "process_start"} == {1, 2, 3}
    assert {e.rank for e in found if e.event == "step"} == {1}  # the first of the living
    assert [e.get("reason") for e in found if e.event == "job_end"] == ["finished"]
