"""--early-stop ends a run as finished after some evaluations that are no better than the best."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from horovod_volo.demo.demo_set import make_demo_set
from tests.ranks.launching import train

# So small a learning rate changes no prediction, nor does batch norm that is frozen: the first evaluation
# stays the best.
SMALL = (
    "--recipe",
    "demo",
    "--img-size",
    "32",
    "--epochs",
    "5",
    "--warmup-epochs",
    "0",
    "--cooldown-epochs",
    "2",
)
STILL = ("--freeze", "stem", "--lr", "1e-12", "--min-lr", "0", "--eval-every", "1", "--early-stop", "2")
LAST_LINE = (
    "done: 15 steps of 35, because 2 evaluations in a row were no better than the best (--early-stop); best "
    "weights in "
)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=40, val=20)  # 5 steps of 8 images per epoch
    return folder


def start(images: Path, output: Path, *more: str, ranks: int) -> subprocess.CompletedProcess[str]:
    where = ("--output", str(output), "--name", "run", "--resume", "auto", "--batch-size", str(8 // ranks))
    return train(
        str(images), *SMALL, *STILL, *where, *more, ranks=ranks, start_with="gloo" if ranks > 1 else "none"
    )


def evaluated_steps(output: Path) -> list[int]:
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    return [record["step"] for record in map(json.loads, lines) if "top1" in record]


def test_a_run_ends_as_finished_and_the_best_weights_stay(images: Path, tmp_path: Path) -> None:
    done = start(images, tmp_path, ranks=2)
    assert done.returncode == 0, done.stdout
    assert LAST_LINE in done.stdout
    assert evaluated_steps(tmp_path) == [5, 10, 15]
    assert (tmp_path / "run" / "checkpoints" / "best").resolve().name == "step_00000005"
    again = start(images, tmp_path, ranks=1)
    assert again.returncode == 0, again.stdout
    assert LAST_LINE in again.stdout
    assert evaluated_steps(tmp_path) == [5, 10, 15]


def test_a_run_that_was_stopped_ends_where_it_would_have(images: Path, tmp_path: Path) -> None:
    assert start(images, tmp_path, "--stop-at-step", "12", ranks=1).returncode == 75
    done = start(images, tmp_path, ranks=1)
    assert done.returncode == 0, done.stdout
    assert LAST_LINE in done.stdout
    assert evaluated_steps(tmp_path) == [5, 10, 15]
