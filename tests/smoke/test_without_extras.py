"""Without the folder of an extra, the core trains; and what the extra brings is refused with its name."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.ranks.launching import run

PACKAGE = Path(__file__).parents[2] / "horovod_volo"
EXTRAS = (
    "bench",
    "demo",
    "dense",
    "doctor",
    "elastic",
    "kernels",
    "labelling",
    "profiler",
    "remote",
    "report",
)
# Flags that need an extra.
FLAGS = {
    "dense": ["--task", "segmentation", "--model", "volo_d1"],
    "elastic": ["--elastic", "--model", "volo_demo", "--global-batch", "8"],
    "remote": [],
}
# An editable installation would find a folder that the copy lacks in the original.
PROGRAM = """
import runpy, sys
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
runpy.run_module("horovod_volo.train", run_name="__main__", alter_sys=True)
"""
TRAIN = ["--model", "volo_demo", "--img-size", "32", "--batch-size", "4", "--epochs", "1", "--name", "run"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of images that no extra has drawn."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split in ("train", "val"):
        for kind in ("ant", "bee"):
            (folder / split / kind).mkdir(parents=True)
            for number in range(8):
                pixels = random.integers(256, size=(40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / kind / f"{number}.jpg")
    return folder


def copy_without(extras: tuple[str, ...], folder: Path) -> Path:
    """Copy the package without some of its folders."""
    copied = folder / "copy" / PACKAGE.name
    shutil.copytree(PACKAGE, copied, ignore=shutil.ignore_patterns("__pycache__"))
    for name in extras:
        shutil.rmtree(copied / name)
    return copied.parent


def train(tree: Path, data: str | Path, folder: Path, *flags: str) -> tuple[int, str]:
    """Train with a copy of the package; return the exit status and what was printed."""
    command = [sys.executable, "-c", PROGRAM, str(data), "--output", str(folder), *flags]
    in_tree = ["bash", "-c", f"cd {shlex.quote(str(tree))} && {shlex.join(command)}"]
    done = run(in_tree, seconds=120, PYTHONPATH=str(tree))
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("extras", [(name,) for name in EXTRAS] + [EXTRAS], ids="+".join)
def test_the_core_trains_without(extras: tuple[str, ...], images: Path, tmp_path: Path) -> None:
    tree = copy_without(extras, tmp_path)
    status, text = train(tree, images, tmp_path / "runs", *TRAIN)
    assert status == 0, text
    assert "done: 4 steps" in text
    assert (tmp_path / "runs/run/ledger.jsonl").exists() == ("elastic" not in extras)


@pytest.mark.parametrize("extra", FLAGS)
def test_what_it_brings_is_refused(extra: str, images: Path, tmp_path: Path) -> None:
    data = "https://example.org/shards" if extra == "remote" else images
    status, text = train(copy_without((extra,), tmp_path), data, tmp_path / "runs", *FLAGS[extra])
    assert status == 2
    assert f"needs horovod_volo/{extra}, which is not installed" in text
