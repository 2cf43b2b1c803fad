"""Ranks that were not started alike are refused in seconds, in one message that names what differs."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest

from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.launching import launcher, python, run

SMALL = ("--recipe", "demo", "--img-size", "32", "--batch-size", "4", "--epochs", "2", "--warmup-epochs", "0")
SECONDS = 60


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=40, val=20)
    return folder


def start(entry: list[str], on_rank_1: str, start_with: str, **extra: str) -> tuple[int, list[str]]:
    """Start an entry on two ranks, rank 1 with other flags; return the status and the lines with an error."""
    command = shlex.join([*python(), "-m", *entry])
    rank = "${HOROVOD_RANK:-$OMPI_COMM_WORLD_RANK}"
    script = f"if [ {rank} = 1 ]; then set -- {on_rank_1}; fi; exec {command} $*"
    began = time.monotonic()
    done = run([*launcher(start_with, 2), "bash", "-c", script], seconds=SECONDS, **extra)
    assert time.monotonic() - began < SECONDS / 2, done.stdout
    return done.returncode, [line for line in done.stdout.splitlines() if "error" in line]


@pytest.mark.parametrize(
    ("start_with", "on_rank_1", "message"),
    [
        ("mpi", "--log-every 3", "--log-every is 25 on rank 0 (HOST) and 3 on rank 1 (HOST)"),
        ("gloo", "--batch-size 5", "--batch-size is 4 on rank 0 (HOST) and 5 on rank 1 (HOST)"),
        (
            "gloo",
            "--seed 7 --hflip 0",
            "--seed is 42 on rank 0 (HOST) and 7 on rank 1 (HOST); --hflip is 0.5 on",
        ),
        ("gloo", "--epochs ten", "--epochs takes a whole number, not 'ten'. (seen on rank 1 of 2)"),
        ("mpi", "--epochs ten", "--epochs takes a whole number, not 'ten'. (seen on rank 1 of 2)"),
    ],
)
def test_other_settings_are_named(
    images: Path, tmp_path: Path, start_with: str, on_rank_1: str, message: str
) -> None:
    entry = ["horovod_volo.train", str(images), *SMALL, "--output", str(tmp_path / "runs")]
    status, errors = start(entry, on_rank_1, start_with)
    assert status not in (0, 75)
    assert len(errors) == 1, errors
    assert message.replace("HOST", Path("/proc/sys/kernel/hostname").read_text().strip()) in errors[0]
    assert not (tmp_path / "runs").exists()


def test_other_flags_of_an_evaluation_are_named(images: Path) -> None:
    entry = ["horovod_volo.evaluate", str(images), "--weights", "nowhere"]
    status, errors = start(entry, "--batch-size 5", "mpi")
    assert status not in (0, 75)
    assert len(errors) == 1
    assert "--batch-size is" in errors[0]
