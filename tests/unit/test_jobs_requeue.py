"""Which Slurm jobs requeue themselves: the scripts of jobs/, without Slurm and MPI."""

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
    at_step, derived = SimpleNamespace(step=step), SimpleNamespace(total_steps=9)
    context: Any = SimpleNamespace(config=config, state=at_step, checkpoints=at_step, derived=derived)
    return end_message(context, finished=False)


def ended(folder: Path, job: str, mpirun: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a job whose mpirun, or srun, is this script."""
    srun = mpirun if "LAUNCHER" in variables else "exit 1"
    for name, line in {"scontrol": 'echo "scontrol $*"', "mpirun": mpirun, "srun": srun}.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    folders = {"SLURM_SUBMIT_DIR": str(CHECKOUT), "OUTPUT_DIR": str(folder), "ACTIVATE_FILE": "/dev/null"}
    script, *arguments = job.split()
    return subprocess.run(
        ["bash", f"jobs/{script}.sbatch", *arguments],
        cwd=CHECKOUT,
        env={"PATH": f"{folder}:/usr/bin:/bin"} | SLURM | folders | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=20,
    )


@pytest.mark.parametrize("job", ["pretrain demo", "elastic demo 8 1", "coarse_to_fine demo demo"])
@pytest.mark.parametrize(("step", "requeued"), [(4, True), (5, False)])
def test_a_job_is_requeued_unless_its_run_reached_the_step_of_stop_at_step(tmp_path, step, requeued, job):
    done = ended(tmp_path, job, f'echo "{last_line(step)}"; exit 75')
    assert done.returncode == 75, done.stdout
    assert last_line(step) in done.stdout
    assert ("scontrol requeue 7" in done.stdout) == requeued, done.stdout


@pytest.mark.parametrize(
    ("mpirun", "variables", "status", "message"),
    [
        # As mpirun sometimes does when a node is lost.
        ("exit 0", {}, 205, "error: mpirun ended before training was finished"),
        ("exit 1", {}, 1, ""),
        ("", {"SLURM_SUBMIT_DIR": "/tmp"}, 2, "sbatch this in the folder of the checkout, not in /tmp"),
        # A file that activates nothing.
        ("", {"ACTIVATE_FILE": "jobs/env.sh"}, 2, "has no PyTorch: set ACTIVATE_FILE in jobs/env.sh\n"),
    ],
)
def test_a_job_that_fails_is_not_requeued(tmp_path, mpirun, variables, status, message):
    done = ended(tmp_path, "pretrain demo", mpirun, **variables)
    assert done.returncode == status, done.stdout
    assert message in done.stdout
    assert "requeue" not in done.stdout


@pytest.mark.parametrize(
    ("job", "launch", "variables", "message"),
    [
        ("elastic demo 8 1", "exit 1", {}, "lost 1 of 1 nodes"),
        # srun kills a rank, although the run has saved.
        ("pretrain demo", f'echo "{last_line(4)}"; exit 137', {"LAUNCHER": "srun"}, last_line(4)),
    ],
)
def test_a_job_that_can_go_on_is_requeued(tmp_path, job, launch, variables, message):
    done = ended(tmp_path, job, launch, **variables)
    assert done.returncode == 75, done.stdout
    assert message in done.stdout
    assert "scontrol requeue 7" in done.stdout
