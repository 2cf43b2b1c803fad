"""ImageNet-ReaL: the validation images looked at again, each with all classes that can be seen in it.

An image is found by the number in its name, ILSVRC2012_val_00000001.JPEG; those without a class are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.loader import NO_CLASS

_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")


class RealScore(NamedTuple):
    """How many images were taken for one of their classes, of how many that have some."""

    right: int
    images: int

    @property
    def accuracy(self) -> float:
        """Return the share of them in per cent."""
        return 100 * self.right / max(1, self.images)


def read_real(file: str, catalog: Catalog, num_classes: int) -> list[frozenset[int]]:
    """Return the classes of each image of a catalog; raise UserError where the file is not for them."""
    lists = _lists(file)
    found = [lists[_place(catalog.name(index), len(lists), file)] for index in range(len(catalog))]
    highest = max((max(classes) for classes in found if classes), default=NO_CLASS)
    if highest == NO_CLASS:
        raise UserError(f"{file} has no class for any image of {catalog.source}. Give ReaL's real.json.")
    if highest >= num_classes:
        raise UserError(
            f"{file} has class {highest}, the network knows {num_classes} classes. --real is for networks of "
            "ImageNet's classes: drop it."
        )
    return found


def score_real(real: Sequence[frozenset[int]], taken: NDArray[np.int64]) -> RealScore:
    """Count the images, of those that were seen, whose class in `taken` (images,) is one of theirs."""
    judged = [
        guess in classes
        for classes, guess in zip(real, taken.tolist(), strict=True)
        if classes and guess != NO_CLASS
    ]
    return RealScore(sum(judged), len(judged))


def _lists(file: str) -> list[frozenset[int]]:
    try:
        lists = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{file} cannot be read: {error.strerror}. Give ReaL's real.json to --real."
        ) from None
    except ValueError as error:
        raise UserError(f"{file} is no JSON: {error}. Give ReaL's real.json to --real.") from None
    if not isinstance(lists, list) or not all(map(_is_list_of_classes, lists)):
        raise UserError(
            f"{file} is not a list of lists of class numbers, one for each image. Give ReaL's real.json to "
            "--real."
        )
    return [frozenset(classes) for classes in lists]


def _is_list_of_classes(entry: object) -> bool:
    return isinstance(entry, list) and all(type(number) is int and number >= 0 for number in entry)


def _place(name: str, entries: int, file: str) -> int:
    """Return the place in the list of the image that is called `name`."""
    numbers = _NUMBER.search(name.rpartition("/")[2])
    number = int(numbers[1]) if numbers else 0
    if not number:
        raise UserError(
            f"{name} carries no number of a validation image. --real is for images with their own names, "
            "ILSVRC2012_val_00000001.JPEG and so on: drop it, or give these."
        )
    if number > entries:
        raise UserError(
            f"{file} has {entries} lists, but {name} is image {number}. Give ReaL's whole real.json."
        )
    return number - 1
