"""The benchmark runs timm's train.py and our trainer on the same few images and reads their results."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from horovod_volo.bench.machine.learning import (
    Budget,
    our_command,
    read_ours,
    read_timm,
    run_once,
    timm_command,
)
from tests.published.checkouts import named_folder

IMAGES, BATCH = 8, 4  # for each of two classes and each split


@pytest.fixture
def budget(tmp_path: Path) -> Budget:
    """Return a budget of one epoch on images of noise."""
    noise = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("cats", "dogs"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for number in range(IMAGES):
                pixels = noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return Budget(str(tmp_path / "images"), 2, 2 * IMAGES, 32, BATCH, 1, 1e-3)


def test_timms_script_runs_and_is_read(budget: Budget, tmp_path: Path) -> None:
    checkout = named_folder() / "timm"
    if not (checkout / "train.py").is_file():
        pytest.skip(f"there is no checkout of timm in {checkout.parent}")
    folder = tmp_path / "runs" / "timm_seed1"
    seconds = run_once(timm_command(budget, str(checkout), 1, folder), folder)
    assert 0 < read_timm(folder, seconds, budget).loss < 3


def test_ours_runs_once_and_is_read(budget: Budget, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "ours_seed1"
    command = our_command(budget, 1, folder, "")
    seconds = run_once(command, folder)
    assert 0 < read_ours(folder, seconds, budget).loss < 3
    assert run_once(command, folder) == seconds  # the run is read, not repeated
