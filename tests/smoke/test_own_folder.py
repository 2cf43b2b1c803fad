"""Training on a folder of classes, with no flag but where results go; stopped and resumed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path


def train(folder: Path, results: Path, *flags: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "horovod_volo.train", str(folder), "--output", str(results), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def test_a_folder_of_classes_is_all_that_training_needs(demo_set: Path, tmp_path: Path) -> None:
    flowers = tmp_path / "flowers"
    shutil.copytree(demo_set / "train", flowers)
    results = tmp_path / "runs"
    status, printed = train(flowers, results, "--stop-at-step", "2")
    assert status == 75, printed
    assert "chosen  volo_demo, images of 64 px" in printed
    assert "held-out images (10 % of each class)" in printed
    assert "first step done after" in printed
    settings = tomllib.loads((results / "flowers" / "resolved.toml").read_text())
    # What the first run chose holds, although other images would lead to another choice.
    epochs = settings["update"]["epochs"]
    status, printed = train(flowers, results, "--resume", "auto", "--stop-at-step", "4")
    assert status == 75, printed
    assert "resumed  at step 2: epoch 0." in printed
    again = tomllib.loads((results / "flowers" / "resolved.toml").read_text())
    assert again["update"]["epochs"] == epochs
    assert again["model"] == settings["model"]
