"""Elastic runs: hosts are lost, stopped, removed and added, and every image of an epoch is taken once.

Three names of this machine count as three hosts.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from horovod_volo.data.demo.demo_set import make_demo_set
from horovod_volo.doctor.ledger import check_ledger
from tests.faults.elastic_run import elastic_run
from tests.ranks.launching import python, run

ONE, TWO = "localhost:1", "127.0.0.1:1"
IMAGES = 60  # 6 steps of 10 images
LONG = ("--epochs", "40", "--eval-every", "40")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=IMAGES, val=10)
    return folder


def test_a_killed_rank_is_replaced(images: Path, tmp_path: Path) -> None:
    with elastic_run(tmp_path, images, f"{ONE},{TWO}", "--global-batch", "10", *LONG) as trial:
        trial.train_on(2)
        trial.signal_rank("127.0.0.1", signal.SIGKILL)
        trial.wait_until(lambda: trial.formations() == [2, 1, 2])
        assert trial.end() == 0, trial.output
        assert "goes on without it: another rank" in trial.output
        assert "formed again (1): 1 ranks" in trial.output
        assert "done: 240 steps" in trial.output
        assert "40 epochs are complete: each of 60 images was taken once" in check_ledger(trial.run)


def test_a_run_that_is_not_elastic_enough(images: Path, tmp_path: Path) -> None:
    command = [
        *python(),
        "-m",
        "horovod_volo.train",
        str(images),
        "--recipe",
        "demo",
        "--output",
        str(tmp_path),
    ]
    without_batch = run([*command, "--elastic"])
    assert without_batch.returncode == 2
    assert "--elastic needs --global-batch" in without_batch.stdout
    alone = run([*command, "--elastic", "--global-batch", "10"])
    assert alone.returncode == 2
    assert "--elastic needs an elastic launcher" in alone.stdout
