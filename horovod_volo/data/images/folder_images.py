"""Lists class folders, CLASS/IMAGE; subfolders of a class folder are ignored."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog_file import Rows
from horovod_volo.data.images.image_bytes import IMAGE_ENDINGS
from horovod_volo.data.images.split_folder import shortened


def list_folders(root: Path, classes: tuple[str, ...], add: Callable[[Rows], None]) -> None:
    """Add the images of all classes in order, each class sorted by name."""
    empty = []
    for number, name in enumerate(classes):
        files = _image_names(root / name)
        if files:
            add(Rows(labels=number, names=files))
        else:
            empty.append(str(root / name))
    if empty:
        raise UserError(
            f"no images in {shortened(empty)}. Add images "
            f"({', '.join(IMAGE_ENDINGS)}) directly inside, or remove the folder."
        )


def _image_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(
            entry.name
            for entry in entries
            if entry.name.lower().endswith(IMAGE_ENDINGS)
            and not entry.name.startswith(".")  # macOS writes "._name.jpg" beside name.jpg
            and entry.is_file()
        )
