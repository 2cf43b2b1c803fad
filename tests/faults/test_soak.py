"""With `--soak`, many seeded faults, each with a restart: the weights are those of a run without."""

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
from tests.ranks.launching import launcher, processes, python, started
from tests.runs import SMALL, assert_same_state, start

FAULTS = int(os.environ.get("SOAK_FAULTS", "25"))  # for each launcher
DONE = "done: 60 steps"
# Semaphores of Python's multiprocessing in horovodrun, and Open MPI's segments: the doctor names them.
LEFT_BY_KILLED_LAUNCHERS = ("sem.mp-", "vader_segment.")
LONGER = ("--epochs", "6", "--warmup-epochs", "1", "--resume", "auto", "--log-every", "2")
LONGER += ("--checkpoint-every", "1", "--ema-decay", "0.9", "--drop-path", "0.2")

pytestmark = pytest.mark.soak


def ranks_of(folder: Path) -> list[int]:
    """Return the processes that train into a folder of this folder."""
    found = processes(str(folder)).items()
    return sorted(pid for pid, line in found if "python" in line.split()[0] and "horovodrun" not in line)


def disturb(process: subprocess.Popen[str], chance: random.Random, folder: Path) -> None:
    """Let one fault happen to a run after a random time."""
    limit = time.monotonic() + 30
    while not ranks_of(folder) and time.monotonic() < limit:
        time.sleep(0.1)
    time.sleep(chance.uniform(3.0, 9.0))  # importing takes the first seconds
    fault = chance.choice(["kill a rank", "kill a rank", "kill the launcher", "stop", "pause a rank"])
    ranks = ranks_of(folder)
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


def check(undisturbed: Path, output: Path) -> None:
    assert_same_state(undisturbed, output)
    assert "6 epochs are complete: each of 80 images was taken once" in check_ledger(output / "run")


@pytest.mark.parametrize("start_with", ["gloo", "mpi"])
def test_faults_do_not_change_the_weights(images, tmp_path, start_with):
    undisturbed = tmp_path / "undisturbed"
    assert DONE in start(images, undisturbed, *LONGER, start_with=start_with)
    chance, completed = random.Random(7), 0
    shared_memory = {path.name for path in Path("/dev/shm").iterdir()}
    for _ in range(FAULTS):
        output = tmp_path / f"run_{completed}"
        arguments = [str(images), *SMALL, *LONGER, "--output", str(output), "--name", "run"]
        program = [*python(plain=True), "-m", "horovod_volo.train", *arguments]
        command = [*launcher(start_with, 2, plain=True), *program]
        with (tmp_path / "output.txt").open("w+") as log, started(command, stdout=log) as process:
            disturb(process, chance, tmp_path)
            process.wait(timeout=60)
        limit = time.monotonic() + 30
        while ranks_of(tmp_path) and time.monotonic() < limit:  # of a killed launcher
            time.sleep(0.2)
        if DONE in (tmp_path / "output.txt").read_text():
            check(undisturbed, output)
            completed += 1
    assert DONE in start(images, tmp_path / f"run_{completed}", *LONGER, start_with=start_with)
    check(undisturbed, tmp_path / f"run_{completed}")
    left = {path.name for path in Path("/dev/shm").iterdir()} - shared_memory
    of_launchers = {name for name in left if name.startswith(LEFT_BY_KILLED_LAUNCHERS)}
    print(f"{FAULTS} faults, {completed + 1} runs completed; of killed launchers {len(of_launchers)} files")
    assert left == of_launchers
