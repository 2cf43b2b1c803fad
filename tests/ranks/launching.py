"""Launches ranks for a test: the parent starts a program under a launcher and reads each rank's result.

If a rank dies or hangs, the launch ends and the test fails.

Ranks are forks of a process that has already imported PyTorch and Horovod (`fork_server.py`). With `plain`
they are interpreters of their own, for tests of start-up, binding and environment.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from horovod_volo.cluster.world import World
from tests.ranks.forking import fork, python_warnings

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
    """Return an environment for ranks that share few cores and may run as root; warnings are errors."""
    return os.environ | {
        "HOROVOD_CYCLE_TIME": "5",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PATH": f"{SCRIPTS}:{os.environ['PATH']}",
        "PYTHONWARNINGS": python_warnings(),
        **extra,
    }


@contextlib.contextmanager
def started(
    command: list[str], stdout: Any = subprocess.PIPE, **extra: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a session of its own for the block, and kill its process group afterwards."""
    with subprocess.Popen(
        command,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**extra),
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run(command: list[str], *, seconds: int = 120, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, or for so many seconds."""
    with started(command, **extra) as process:
        output, _ = process.communicate(timeout=seconds)
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def wait_until(
    holds: Callable[[], object],
    seconds: float,
    what: str,
    context: Callable[[], str] = str,
    pause: float = 0.05,
    process: subprocess.Popen[Any] | None = None,
) -> None:
    """Wait until a condition holds, asked after pauses; fail after so many seconds, or if a process ends."""
    end = time.monotonic() + seconds
    while not holds():
        assert process is None or process.poll() is None, f"it has ended before {what}\n{context()}"
        assert time.monotonic() < end, f"waited {seconds:.0f} seconds for {what}\n{context()}"
        time.sleep(pause)


def processes(text: str) -> dict[int, str]:
    """Return the command lines of this machine's processes that contain a text, by process."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # the process has ended
            line = file.read_bytes().decode(errors="replace").replace("\0", " ")
            if text in line:
                found[int(file.parent.name)] = line
    return found


def on_ranks(
    out: Path, *calls: Callable[[World], Any], ranks: int = 2, start_with: str = "gloo"
) -> list[list[Any]]:
    """Let each rank call these functions of modules, or partials of them; return the results, by rank."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "calls").write_bytes(pickle.dumps(calls))
    # These ranks are not bound to cores. The trainer binds its ranks, and divides the threads among them.
    command = [*launcher(start_with, ranks), *python(), "-m", "tests.ranks.worker", str(out)]
    done = run(command, seconds=240, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout
    found = [torch.load(out / f"rank_{rank}.pt", weights_only=True) for rank in range(ranks)]
    return [list(of_ranks) for of_ranks in zip(*found, strict=True)]


def alone(call: Callable[[World], Any]) -> Any:
    """Call such a function in this process, as the only rank, on one thread as each of several ranks."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return call(World.single())
    finally:
        torch.set_num_threads(threads)


def train(
    *arguments: str, ranks: int, start_with: str, seconds: int = 240, plain: bool = False, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m horovod_volo.train` on ranks."""
    trainer = [*python(plain), "-m", "horovod_volo.train", *arguments]
    return run([*launcher(start_with, ranks, plain=plain), *trainer], seconds=seconds, **extra)
