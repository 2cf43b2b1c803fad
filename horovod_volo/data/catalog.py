"""Which images there are and what class each belongs to.

A class's number is its folder's place in the sorted folder names: weights, label maps and
the evaluation all rely on it, so the order here must never change.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from horovod_volo.config.errors import UserError

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
FOLDER_NAMES = {"train": ("train",), "val": ("val", "validation")}
NAMES_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Catalog:
    """The images of one split: image i lies at root / paths[i] and is of class targets[i]."""

    root: Path
    classes: tuple[str, ...]
    paths: tuple[str, ...]  # "CLASS/FILE", sorted by class, then by file
    targets: NDArray[np.int64]  # (images,)

    def __len__(self) -> int:
        return len(self.paths)


def read_folder(data_dir: str, split: Literal["train", "val"]) -> Catalog:
    """List the images of one split of `data_dir`; folders below a class folder are not read."""
    root = _split_folder(data_dir, split)
    classes = tuple(sorted(_visible_folders(root)))
    if not classes:
        raise UserError(
            f"{root} has no class folders. Put each image under {root}/CLASS/, one folder for each class."
        )
    images = [_image_names(root / name) for name in classes]
    empty = [str(root / name) for name, files in zip(classes, images, strict=True) if not files]
    if empty:
        raise UserError(
            f"no images in {_shortened(empty)}. Add images "
            f"({', '.join(IMAGE_ENDINGS)}) directly inside, or remove the folder."
        )
    return Catalog(
        root=root,
        classes=classes,
        paths=tuple(f"{name}/{file}" for name, files in zip(classes, images, strict=True) for file in files),
        targets=np.repeat(np.arange(len(classes), dtype=np.int64), [len(files) for files in images]),
    )


def check_same_classes(train: Catalog, val: Catalog) -> None:
    """Refuse splits whose class folders differ: the same number would mean two classes."""
    unknown = sorted(set(val.classes) - set(train.classes))
    missing = sorted(set(train.classes) - set(val.classes))
    if unknown:
        raise UserError(
            f"{val.root} has classes that {train.root} lacks: {_shortened(unknown)}. "
            "Remove these folders, or add training images of these classes."
        )
    if missing:
        raise UserError(
            f"{val.root} lacks classes that {train.root} has: {_shortened(missing)}. Classes are numbered "
            "by their folders, so both need the same folders: add validation images of these classes."
        )


def _split_folder(data_dir: str, split: Literal["train", "val"]) -> Path:
    if not data_dir:
        raise UserError("no data folder is given. Name the folder that holds train/ and val/.")
    data = Path(data_dir)
    if not data.is_dir():
        raise UserError(f"there is no data folder {data}. Name the folder that holds train/ and val/.")
    names = FOLDER_NAMES[split]
    for name in names:
        if (data / name).is_dir():
            return data / name
    found = sorted(_visible_folders(data))
    raise UserError(
        f"{data} has no folder {' or '.join(names)}; "
        + (f"it has {_shortened(found)}. " if found else "it has no folders at all. ")
        + f"Name the folder above it, or arrange the images as {data / names[0]}/CLASS/IMAGE."
    )


def _visible_folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]


def _image_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.name.lower().endswith(IMAGE_ENDINGS)
            and not entry.name.startswith(".")  # "._name.jpg" is what other systems leave beside name.jpg
            and entry.is_file()
        )


def _shortened(names: list[str]) -> str:
    rest = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
