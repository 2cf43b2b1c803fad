"""ImageNet-ReaL, new labels of the validation images, and ImageNet-V2, new images.

ReaL's real.json lists all classes that are visible in an image, by the number in the image's name,
ILSVRC2012_val_00000001.JPEG. Images without a class do not count.

V2 has no splits, and its class folders are named by class numbers. Other catalogs sort folder names as text,
where "10" is before "2".
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from horovod_volo.cluster.world import World
from horovod_volo.core.batch import NO_CLASS
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog, list_split
from horovod_volo.data.images.split_folder import SplitFolder, check_links, shortened, visible

_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")


def read_real(file: str, catalog: Catalog, num_classes: int) -> list[frozenset[int]]:
    """Return the classes of each image of a catalog; raise UserError if the file does not fit the images."""
    lists = _read_lists(file)
    real = [lists[_row(catalog.name(index), len(lists), file)] for index in range(len(catalog))]
    highest = max((max(classes) for classes in real if classes), default=NO_CLASS)
    if highest == NO_CLASS:
        raise UserError(f"{file} has no class for any image of {catalog.source}. Give ReaL's real.json.")
    if highest >= num_classes:
        raise UserError(
            f"{file} has class {highest}, but the network has {num_classes} classes. --real is for "
            "networks of ImageNet's classes: drop it."
        )
    return real


def count_real(real: Sequence[frozenset[int]], predictions: NDArray[np.int64]) -> dict[str, float]:
    """Return the accuracy of predictions (images,) in per cent, how many are right, and of how many images.

    Images that have no class, and damaged ones (NO_CLASS), do not count.
    """
    correct = [
        prediction in classes
        for classes, prediction in zip(real, predictions.tolist(), strict=True)
        if classes and prediction != NO_CLASS
    ]
    right, images = sum(correct), len(correct)
    return {"accuracy": 100 * right / max(1, images), "right": right, "images": images}


def _read_lists(file: str) -> list[frozenset[int]]:
    remedy = "Give ReaL's real.json to --real."
    try:
        lists = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}. {remedy}") from None
    rows = lists if isinstance(lists, list) else [None]
    if not all(isinstance(row, list) and all(type(n) is int and n >= 0 for n in row) for row in rows):
        raise UserError(f"{file} is not a list of lists of class numbers, one for each image. {remedy}")
    return [frozenset(classes) for classes in lists]


def _row(name: str, entries: int, file: str) -> int:
    """Return the row of real.json for the image named `name`."""
    match = _NUMBER.search(name.rpartition("/")[2])
    number = int(match[1]) if match else 0
    if not number:
        raise UserError(
            f"{name} has no number of a validation image. --real needs images with their original names, "
            "ILSVRC2012_val_00000001.JPEG and so on: drop it, or give such images."
        )
    if number > entries:
        raise UserError(
            f"{file} has {entries} lists, but {name} is image {number}. Give ReaL's complete real.json."
        )
    return number - 1


def numbered_catalog(data_dir: str, world: World) -> Catalog:
    """List the images of numbered class folders in memory, on each rank. Collective."""
    catalog = world.run_on_all_ranks(lambda: list_numbered(data_dir))
    same = world.broadcast_object(catalog.digest) == catalog.digest
    text = f"the images in {data_dir} differ between hosts. Give a folder that all hosts share."
    world.raise_on_all_ranks(None if same else UserError(text))
    return catalog


def list_numbered(data_dir: str) -> Catalog:
    """List a folder whose class folders are named 0, 1, 2 and so on; raise UserError if they are not."""
    root = Path(data_dir).absolute()
    try:
        names, files, lost = visible(root)
        check_links(root, lost, len(names) + len(files))
        numbers = [str(number) for number in range(max(1, len(names)))]
        if wrong := sorted({*names} ^ {*numbers}):
            raise UserError(
                f"{root} does not have the class folders 0, 1, 2 and so on that --v2 needs: additional or "
                f"missing are {shortened(wrong)}. Give the folder that directly holds them, or drop --v2."
            )
        return list_split(SplitFolder(root, "folder", tuple(numbers), state=""), path=None)
    except OSError as error:
        raise UserError(f"cannot list the images of {root}: {error}. Fix this file or folder.") from error
