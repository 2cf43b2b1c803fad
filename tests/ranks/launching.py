"""Real ranks for a test: the parent starts a worker script under a launcher and reads what each rank left.

A worker is `tests/ranks/worker_NAME.py`; it is given an output folder and writes `rank_R.pt` there.
A rank that dies or hangs ends the whole launch: the test fails, it never waits for ever.

Ranks are forks of one process that has imported PyTorch and Horovod already (`fork_server.py`). Tests of
what such a fork cannot show, start-up, binding and environment, ask for interpreters of their own: `plain`.
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

HERE = Path(__file__).parent
SCRIPTS = Path(sys.executable).parent


def launcher(name: str, ranks: int, *, plain: bool = False) -> list[str]:
    """Return the words that start `ranks` ranks of what follows; horovodrun imports PyTorch too."""
    horovodrun = [*([] if plain else python()), str(SCRIPTS / "horovodrun"), "-np", str(ranks)]
    return {
        "gloo": [*horovodrun, "--gloo"],
        "horovodrun-mpi": [*horovodrun, "--mpi"],
        "mpi": ["mpirun", "-np", str(ranks), "--oversubscribe", "-bind-to", "none", "-map-by", "slot"],
        "none": [],
    }[name]


def python(plain: bool = False) -> list[str]:
    """Return the words that run the Python program of those behind them."""
    return [sys.executable] if plain else fork()


def environment(**extra: str) -> dict[str, str]:
    """Return an environment for ranks that share few cores; as root, Open MPI wants to be reported twice."""
    return os.environ | {
        "HOROVOD_CYCLE_TIME": "5",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        **extra,
    }


def run(words: list[str], *, seconds: int = 120, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command in its own process group, which does not outlive the call."""
    with subprocess.Popen(
        words,
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
    return subprocess.CompletedProcess(words, process.returncode, output, "")


def ranks_of(
    worker: str, out: Path, *arguments: str, ranks: int, start_with: str, plain: bool = False, **extra: str
) -> list[dict[str, Any]]:
    """Run a worker on each rank and return what each left, by rank."""
    out.mkdir(parents=True, exist_ok=True)
    script = str(HERE / f"worker_{worker}.py")
    words = [*launcher(start_with, ranks, plain=plain), *python(plain), script, str(out), *arguments]
    # Workers bind themselves to no cores; the trainer does, and gives each rank its share of threads.
    done = run(words, **{"OMP_NUM_THREADS": "1", **extra})
    assert done.returncode == 0, done.stdout
    return [torch.load(out / f"rank_{rank}.pt", weights_only=True) for rank in range(ranks)]


def train(
    *arguments: str, ranks: int, start_with: str, seconds: int = 240, plain: bool = False, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run the trainer's own entry."""
    words = [
        *launcher(start_with, ranks, plain=plain),
        *python(plain),
        "-m",
        "horovod_volo.train",
        *arguments,
    ]
    return run(words, seconds=seconds, **extra)
