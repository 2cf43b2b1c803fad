"""Settings of a run of a few steps on drawn images, and a disk that is soon full."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from horovod_volo.config.recipe import assemble
from horovod_volo.config.schema import Config
from horovod_volo.demo.demo_set import make_demo_set

SETTINGS: dict[str, Any] = {"model": "volo_demo", "img_size": 32, "batch_size": 4, "epochs": 1, "name": "run"}
SETTINGS |= {"warmup_epochs": 0, "cooldown_epochs": 0, "log_every": 1, "workers": 1}


def small_run(folder: Path, *, train: int = 12, **changes: Any) -> Config:
    """Draw images and return the settings of a run of one epoch in batches of four."""
    images = folder / "images"
    if not images.exists():
        make_demo_set(images, train=train, val=10)
    places = {"data_dir": str(images), "output": str(folder / "runs")}
    return assemble(SETTINGS | places | changes, fallback_name="")


@contextmanager
def mounted_disk(folder: Path, size: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting is not allowed here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
