"""Launches ranks for a test: the parent starts a worker script under a launcher and reads each rank's result.

A worker is `tests/ranks/worker_NAME.py`; its first argument is an output folder, where it writes `rank_R.pt`.
If a rank dies or hangs, the launch ends and the test fails.

Ranks are forks of a process that has already imported PyTorch and Horovod (`fork_server.py`). With `plain`
they are interpreters of their own, for tests of start-up, binding and environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.ranks.forking import fork
from tests.ranks.warning_filters import python_warnings

HERE = Path(__file__).parent
SCRIPTS = Path(sys.executable).parent


def launcher(name: str, ranks: int, *, plain: bool = False) -> list[str]:
    """Return the command prefix that starts `ranks` ranks; horovodrun imports PyTorch and is forked too."""
    horovodrun = [*([] if plain else python()), str(SCRIPTS / "horovodrun"), "-np", str(ranks)]
    return {
        "gloo": [*horovodrun, "--gloo"],
        "horovodrun-mpi": [*horovodrun, "--mpi"],
        "mpi": ["mpirun", "-np", str(ranks), "--oversubscribe", "-bind-to", "none", "-map-by", "slot"],
        "none": [],
    }[name]


def python(plain: bool = False) -> list[str]:
    """Return the command prefix that runs a Python program."""
    return [sys.executable] if plain else fork()


def environment(**extra: str) -> dict[str, str]:
    """Return an environment for ranks that share few cores, in which warnings are errors.

    Open MPI runs as root only if two variables allow it.
    """
    return os.environ | {
        "HOROVOD_CYCLE_TIME": "5",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "PYTHONWARNINGS": python_warnings(),
        **extra,
    }


def run(command: list[str], *, seconds: int = 120, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command in its own process group, which is killed at the end of the call."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**extra),
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def ranks_of(
    worker: str, out: Path, *arguments: str, ranks: int, start_with: str, plain: bool = False, **extra: str
) -> list[dict[str, Any]]:
    """Run a worker on each rank and return the results by rank."""
    out.mkdir(parents=True, exist_ok=True)
    script = str(HERE / f"worker_{worker}.py")
    command = [*launcher(start_with, ranks, plain=plain), *python(plain), script, str(out), *arguments]
    # Workers are not bound to cores. The trainer binds its ranks, and divides the threads among them.
    done = run(command, **{"OMP_NUM_THREADS": "1", **extra})
    assert done.returncode == 0, done.stdout
    return [torch.load(out / f"rank_{rank}.pt", weights_only=True) for rank in range(ranks)]


def train(
    *arguments: str, ranks: int, start_with: str, seconds: int = 240, plain: bool = False, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m horovod_volo.train` on ranks."""
    command = [
        *launcher(start_with, ranks, plain=plain),
        *python(plain),
        "-m",
        "horovod_volo.train",
        *arguments,
    ]
    return run(command, seconds=seconds, **extra)
