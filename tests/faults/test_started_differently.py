"""Ranks that were not started alike are refused in seconds, in one message that names what differs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.ranks.launching import launcher, python, run
from tests.runs import SMALL, only_error

SECONDS = 30
HOST = Path("/proc/sys/kernel/hostname").read_text().strip()
TRAIN = ("horovod_volo.train", *SMALL)


@pytest.mark.parametrize(
    ("entry", "start_with", "on_rank_1", "messages"),
    [
        (
            TRAIN,
            "gloo",
            "--seed 7 --hflip 0",
            (f"--seed is 42 on rank 0 ({HOST}) and 7 on rank 1 ({HOST})", "--hflip is 0.5 on"),
        ),
        (TRAIN, "mpi", "--epochs ten", ("--epochs takes a whole number", "(seen on rank 1 of 2)")),
        (("horovod_volo.evaluate", "--weights", "nowhere"), "mpi", "--batch-size 5", ("--batch-size is",)),
    ],
)
def test_what_differs_is_named(images, tmp_path, entry, start_with, on_rank_1, messages):
    module, *flags = entry
    where = ["--output", str(tmp_path / "runs")] if entry is TRAIN else []
    command = shlex.join([*python(), "-m", module, str(images), *flags, *where])
    rank = "${HOROVOD_RANK:-$OMPI_COMM_WORLD_RANK}"
    script = f"if [ {rank} = 1 ]; then set -- {on_rank_1}; fi; exec {command} $*"
    done = run([*launcher(start_with, 2), "bash", "-c", script], seconds=SECONDS)
    assert done.returncode not in (0, 75)
    error = only_error(done.stdout)
    assert all(message in error for message in messages), error
    assert not (tmp_path / "runs").exists()
