"""A bit that flips in one rank's weights is found at the next checkpoint, and the steps are trained again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.elastic.ledger_check import check_ledger
from tests.ranks.launching import train

SMALL = "--recipe demo --img-size 32 --batch-size 4 --epochs 2 --warmup-epochs 0 --eval-every 2 --name run"
EVERY = "--checkpoint-every 2 --log-every 1 --drop-path 0.1 --ema-decay 0.9 --plugin tests.faults.injected"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "set"
    make_demo_set(folder, train=72, val=10)  # 6 steps of 3 ranks
    return folder


def start(
    images: Path, output: Path, fault: str, *flags: str, ranks: int, start_with: str
) -> tuple[int, str]:
    arguments = (str(images), *SMALL.split(), *EVERY.split(), "--output", str(output), *flags)
    done = train(*arguments, ranks=ranks, start_with=start_with, INJECTED_FAULT=fault)
    return done.returncode, done.stdout


def weights(output: Path) -> dict[str, object]:
    last = output / "run" / "checkpoints" / "last"
    return {
        f"{file.name} {name}": tensor.numpy().tobytes()
        for file in last.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("start_with", ["gloo", "mpi"])
def test_the_run_is_repaired(images: Path, tmp_path: Path, start_with: str) -> None:
    status, output = start(images, tmp_path / "hit", "1:3:flip", ranks=3, start_with=start_with)
    assert status == 0, output
    assert "the weights or the optimizer state of rank 1 on " in output
    assert output.count("Back to step_00000002: the steps since then are trained again") == 1, output
    status, _ = start(images, tmp_path / "well", "1:99:flip", ranks=3, start_with=start_with)
    assert status == 0
    assert weights(tmp_path / "hit") == weights(tmp_path / "well")
    assert "2 steps were trained again" in check_ledger(tmp_path / "hit" / "run")
    lines = (tmp_path / "hit" / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if "lr" in record]
    assert steps == list(range(1, 13))


def test_without_a_checkpoint(images: Path, tmp_path: Path) -> None:
    """Of two ranks nobody can tell which is right."""
    status, output = start(images, tmp_path, "1:0:flip", "--batch-size", "6", ranks=2, start_with="gloo")
    assert status not in (0, 75), output
    errors = [line for line in output.splitlines() if "error" in line and "differ" in line]
    assert len(errors) == 1, output
    assert "At step 2 the weights or the optimizer state of rank 0 on " in errors[0]
    assert "start again with --resume auto" in errors[0]
