"""Many seeded faults, each with a restart: the final weights are those of a run without faults, bit for bit.

Behind `./tools/test --soak`.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from horovod_volo.elastic.ledger import check_ledger
from tests.faults.runs import SMALL, weights
from tests.ranks.launching import environment, launcher, python, train

FAULTS = int(os.environ.get("SOAK_FAULTS", "25"))  # for each launcher
DONE = "done: 60 steps"
# Semaphores of Python's multiprocessing in horovodrun, and Open MPI's segments: the doctor names them.
LEFT_BY_KILLED_LAUNCHERS = ("sem.mp-", "vader_segment.")
LONGER = (*SMALL, "--epochs", "6", "--warmup-epochs", "1", "--name", "run")
LONGER += ("--checkpoint-every", "1", "--log-every", "2", "--ema-decay", "0.9", "--drop-path", "0.2")

pytestmark = pytest.mark.soak


def ranks_of(launcher_pid: int) -> list[int]:
    """Return the processes that train, among the descendants of a launcher."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(") ")[2].split()[1])
    found, last = {launcher_pid}, 0
    while len(found) > last:
        last = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return sorted(pid for pid in found - {launcher_pid} if b"horovod_volo.train" in command_line(pid))


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def disturb(process: subprocess.Popen[str], chance: random.Random) -> None:
    """Let one fault happen to a run after a random time."""
    limit = time.monotonic() + 30
    while not ranks_of(process.pid) and time.monotonic() < limit:
        time.sleep(0.1)
    time.sleep(chance.uniform(3.0, 9.0))  # importing takes the first seconds
    fault = chance.choice(["kill a rank", "kill a rank", "kill the launcher", "stop", "pause a rank"])
    ranks = ranks_of(process.pid)
    with contextlib.suppress(ProcessLookupError, IndexError):
        if fault == "kill a rank":
            os.kill(chance.choice(ranks), signal.SIGKILL)
        elif fault == "kill the launcher":
            process.kill()
        elif fault == "stop":
            process.terminate()
        else:
            paused = chance.choice(ranks)
            os.kill(paused, signal.SIGSTOP)
            time.sleep(1)
            os.kill(paused, signal.SIGCONT)
            time.sleep(1)
            process.kill()


@pytest.mark.parametrize("start_with", ["gloo", "mpi"])
def test_faults_do_not_change_the_weights(images: Path, tmp_path: Path, start_with: str) -> None:
    undisturbed = train(
        str(images), *LONGER, "--output", str(tmp_path / "undisturbed"), ranks=2, start_with=start_with
    )
    assert DONE in undisturbed.stdout
    expected = weights(tmp_path / "undisturbed")
    chance, happened, completed = random.Random(7), 0, 0
    shared_memory = {path.name for path in Path("/dev/shm").iterdir()}
    while happened < FAULTS:
        output = tmp_path / f"run_{completed}"
        command = [
            *launcher(start_with, 2, plain=True),
            *python(plain=True),
            "-m",
            "horovod_volo.train",
            str(images),
            *LONGER,
        ]
        command += ["--output", str(output), "--resume", "auto"]
        with (tmp_path / "output.txt").open("a+", encoding="utf-8") as log:
            began = log.tell()
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
                text=True,
            )
            try:
                disturb(process, chance)
                process.wait(timeout=60)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            happened += 1
            log.seek(began)
            shown = log.read()
        limit = time.monotonic() + 30
        while ranks_of(1) and time.monotonic() < limit:  # of a killed launcher
            time.sleep(0.2)
        if DONE in shown:
            assert weights(output) == expected
            assert "6 epochs are complete: each of 80 images was taken once" in check_ledger(output / "run")
            completed += 1
    resumed = (str(images), *LONGER, "--output", str(tmp_path / f"run_{completed}"), "--resume", "auto")
    assert DONE in train(*resumed, ranks=2, start_with=start_with).stdout
    assert weights(tmp_path / f"run_{completed}") == expected
    assert "6 epochs are complete" in check_ledger(tmp_path / f"run_{completed}" / "run")
    left = {path.name for path in Path("/dev/shm").iterdir()} - shared_memory
    of_launchers = {name for name in left if name.startswith(LEFT_BY_KILLED_LAUNCHERS)}
    print(f"{happened} faults, {completed + 1} runs completed; of killed launchers {len(of_launchers)} files")
    assert left == of_launchers
