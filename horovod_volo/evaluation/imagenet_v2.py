"""The images of ImageNet-V2: class folders that are named by class numbers, without splits.

The folder's name is the class number. Other catalogs sort folder names as text, where "10" is before "2".
"""

from __future__ import annotations

import os
from pathlib import Path

from horovod_volo.cluster.world import World
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.images.listing import list_images
from horovod_volo.data.images.open_files import OpenFile
from horovod_volo.data.images.split_folder import SplitFolder, shortened


def numbered_catalog(data_dir: str, world: World) -> Catalog:
    """List the images of numbered class folders in memory, on each rank. Collective."""
    catalog = world.run_on_all_ranks(lambda: list_numbered(data_dir))
    digests = world.allgather_object(catalog.digest)
    world.raise_on_all_ranks(
        None
        if digests[0] == catalog.digest
        else UserError(f"the images in {data_dir} differ between hosts. Give a folder that all hosts share.")
    )
    return catalog


def list_numbered(data_dir: str) -> Catalog:
    """List a folder whose class folders are named 0, 1, 2 and so on; raise UserError if they are not."""
    root = Path(data_dir).absolute()
    images = SplitFolder(root, "folder", _numbered_folders(root), state="")
    memory = OpenFile(os.memfd_create("catalog", os.MFD_CLOEXEC))
    try:
        list_images(images, memory.descriptor)
    except OSError as error:
        raise UserError(f"cannot list the images of {root}: {error}. Fix this file or folder.") from error
    return Catalog(memory, path=None)


def _numbered_folders(root: Path) -> tuple[str, ...]:
    """Return the names of the class folders in the order of their numbers."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise UserError(
            f"there is no data folder {root}: {error.strerror}. Give ImageNet-V2's folder of class folders."
        ) from None
    others = sorted(name for name in names if not (name.isascii() and name.isdecimal()))
    if others or not names:
        found = f"the folders {shortened(others)}" if others else "no folders"
        raise UserError(
            f"{root} has {found}. With --v2 its class folders must be numbers, 0, 1, 2 and so on: give the "
            "folder that directly holds them, or drop --v2."
        )
    folders = sorted(names, key=int)
    missing = sorted(set(range(len(folders))) - set(map(int, folders)))
    if missing:
        raise UserError(
            f"{root} has {len(folders)} class folders, but none for class {missing[0]}. The folder's name is "
            "the class number: add the missing folder."
        )
    return tuple(folders)
