"""Which Slurm jobs requeue themselves: the scripts of jobs/, without Slurm and MPI."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_volo.config.recipe import assemble
from horovod_volo.engine.run import end_message

CHECKOUT = Path(__file__).parents[2]
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"}


def last_line(step: int) -> str:
    """Return the trainer's last line of a run that stopped at a step."""
    config = assemble({"stop_at_step": 5, "data_dir": "images"}, fallback_name="run")
    context: Any = SimpleNamespace(
        config=config, state=SimpleNamespace(step=step), derived=SimpleNamespace(total_steps=9)
    )
    return end_message(context, finished=False)


@pytest.mark.parametrize("job", ["pretrain demo", "elastic demo 8 1", "coarse_to_fine demo demo"])
@pytest.mark.parametrize(("step", "requeued"), [(4, True), (5, False)])
def test_a_job_is_requeued_unless_its_run_reached_the_step_of_stop_at_step(
    tmp_path: Path, step: int, requeued: bool, job: str
) -> None:
    ends = {"scontrol": 'echo "scontrol $*"', "mpirun": f'echo "{last_line(step)}"; exit 75'}
    for name, line in ends.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    folders = {"SLURM_SUBMIT_DIR": str(CHECKOUT), "OUTPUT_DIR": str(tmp_path), "ACTIVATE_FILE": "/dev/null"}
    script, *arguments = job.split()
    done = subprocess.run(
        ["bash", f"jobs/{script}.sbatch", *arguments],
        cwd=CHECKOUT,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"} | SLURM | folders,
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.returncode == 75, done.stderr
    assert last_line(step) in done.stdout
    assert ("scontrol requeue 7" in done.stdout) == requeued, done.stdout
