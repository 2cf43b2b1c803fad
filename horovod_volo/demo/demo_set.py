"""Make the demo data set: a small, learnable substitute for ImageNet and its token labels.

    python -m horovod_volo.demo.demo_set FOLDER [--train 4000] [--val 1000]

Writes FOLDER/train/CLASS/NAME.jpg, FOLDER/val/CLASS/NAME.jpg and, for training images, the label map
FOLDER/token_labels/CLASS/NAME.pt, which covers the whole image. Invariants: an image depends only on (seed,
split, number), so that the images of a smaller set are also in a larger one; FOLDER is created atomically.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.demo.demo_image import CLASSES, Floats, draw_demo_image
from horovod_volo.token_labels.geometry import WHOLE
from horovod_volo.token_labels.published_maps import GEOMETRY_FILE

# Increase when the content of the set changes, so that folders of earlier versions are not reused.
EDITION = 1
DESCRIPTION = "demo_set.json"
SPLIT_STREAMS = {"train": 0, "val": 1}

# The logit of the object's class rises linearly with the covered fraction of the cell, up to this fraction.
MAX_LOGIT = 16.0
MAX_LOGIT_COVERAGE = 0.25
TOP_K = 5  # classes per cell, as in the published maps


def make_demo_set(
    folder: Path, *, train: int = 4000, val: int = 1000, image_side: int = 64, seed: int = 0
) -> None:
    """Create the demo set in `folder`; do nothing if the same set is already there."""
    if min(train, val) < len(CLASSES):
        raise UserError(
            f"a demo set of {train} training and {val} validation images has empty classes. "
            f"Give at least {len(CLASSES)} of each: one per class."
        )
    description = {"edition": EDITION, "train": train, "val": val, "image_side": image_side, "seed": seed}
    with new_set(folder, description) as partial:
        if partial is not None:
            for split, count in (("train", train), ("val", val)):
                _make_split(partial, split, count, image_side=image_side, seed=seed)
        # Square maps are not assumed to be of whole images. Earlier versions did not write this file.
        geometry = (partial or folder) / "token_labels" / GEOMETRY_FILE
        if not geometry.exists():
            with atomic_write(geometry) as file:
                file.write(f"{WHOLE}\n".encode())


@contextmanager
def new_set(folder: Path, description: dict[str, int]) -> Iterator[Path | None]:
    """Give a temporary folder to make a set in, which becomes `folder`; None if the same set is there."""
    if _is_same_set(folder, description):
        yield None
        return
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        (partial / DESCRIPTION).write_text(json.dumps(description) + "\n")
        try:
            partial.replace(folder)
        except OSError:
            # Another process may have created the same set in the meantime.
            if not _is_same_set(folder, description):
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_same_set(folder: Path, description: dict[str, int]) -> bool:
    """Return True for the same set, False for no or an empty folder; else raise UserError."""
    if not folder.exists():
        return False
    try:
        existing = json.loads((folder / DESCRIPTION).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        if folder.is_dir() and not any(folder.iterdir()):
            return False
        raise UserError(
            f"{folder} exists and is not a demo set. Name a folder that does not exist yet."
        ) from None
    if existing != description:
        raise UserError(
            f"{folder} holds another demo set: {existing} instead of {description}. "
            "Delete it, or name another folder."
        )
    return True


def _make_split(root: Path, split: str, count: int, *, image_side: int, seed: int) -> None:
    for name in CLASSES:
        (root / split / name).mkdir(parents=True)
        if split == "train":
            (root / "token_labels" / name).mkdir(parents=True)
    for number in range(count):
        random = np.random.default_rng((seed, SPLIT_STREAMS[split], number))
        index, target = divmod(number, len(CLASSES))
        name, stem = CLASSES[target], f"n{target:04d}_{index:05d}"
        image, coverage = draw_demo_image(name, random, image_side=image_side)
        image.save(root / split / name / f"{stem}.jpg", quality=int(random.integers(75, 96)))
        if split == "train":
            label = token_label(coverage, target, random)
            torch.save(torch.from_numpy(label), root / "token_labels" / name / f"{stem}.pt")


def token_label(coverage: Floats, target: int, random: np.random.Generator) -> NDArray[np.float16]:
    """Return the label map of a perfect teacher in the published format, (2, top k, rows, columns).

    Cells without the object get small random logits, because no class stands for the background.
    """
    logits = random.uniform(0, 1, (len(CLASSES), *coverage.shape))  # (classes, rows, columns)
    logits[target] += MAX_LOGIT * np.minimum(1, coverage / MAX_LOGIT_COVERAGE)
    top = np.argsort(-logits, axis=0)[:TOP_K]  # (top, rows, columns)
    return np.stack([np.take_along_axis(logits, top, axis=0), top]).astype(np.float16)


def run_command(
    make: Callable[..., None], module: str, description: str, arguments: Sequence[str] | None
) -> None:
    """Run the command line of a module that makes a set; the numbers of images have its defaults."""
    train, val = (signature(make).parameters[split].default for split in ("train", "val"))
    parser = argparse.ArgumentParser(prog=f"python -m horovod_volo.demo.{module}", description=description)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to create")
    parser.add_argument("--train", type=int, default=train, help="training images (default: %(default)s)")
    parser.add_argument("--val", type=int, default=val, help="validation images (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    try:
        make(chosen.folder, train=chosen.train, val=chosen.val)
    except UserError as error:
        parser.exit(2, f"{error}\n")
    sys.stdout.write(f"{chosen.folder}: {chosen.train} training and {chosen.val} validation images\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    description = "Make a small image classification set with token labels for first runs of the trainer."
    run_command(make_demo_set, "demo_set", description, arguments)


if __name__ == "__main__":
    main()
