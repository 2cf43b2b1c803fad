"""The list of a split's images and boxes, in the layout of COCO or of one's own data:

annotations/instances_{train,val}2017.json    {train,val}2017/NAME.jpg, or in images/
boxes/{train,val}.json                        images/{train,val}/NAME.jpg
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.split_folder import Split
from horovod_volo.data.reading import read_image
from horovod_volo.dense.annotations import Annotations, BoxArrays, map_annotations, read_annotations

_THINNEST = 0.1  # pixels; thinner boxes are not learned


class ImageBoxes(NamedTuple):
    """The boxes of one image that are learned."""

    boxes: NDArray[np.float64]  # (boxes, 4) left, top, right, bottom in pixels, inside the image
    classes: NDArray[np.int16]  # (boxes,) from 0


class BoxFiles(NamedTuple):
    """Where a split's annotations and images are."""

    annotations: Path
    images: Path
    split: Split


@dataclass(frozen=True, eq=False)
class BoxList:
    """The images of a split, with their boxes."""

    files: BoxFiles
    annotations: Annotations
    numbers: NDArray[np.int64]  # positions of the images in the annotations, ascending

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def classes(self) -> Sequence[str]:
        """Return the names of the classes."""
        return self.annotations.classes

    @property
    def digest(self) -> str:
        """Return a checksum of the annotations and of the choice of images."""
        listed = self.annotations.digest.encode() + np.ascontiguousarray(self.numbers).tobytes()
        return hashlib.sha256(listed).hexdigest()

    def close(self) -> None:
        """Close nothing: files are opened one by one."""

    def name(self, index: int) -> str:
        """Return the name of an image's file."""
        number, arrays = int(self.numbers[index]), self.annotations.arrays
        begin = int(arrays.name_ends[number - 1]) if number else 0
        return os.fsdecode(arrays.names[begin : int(arrays.name_ends[number])].tobytes())

    def location(self, index: int) -> str:
        """Return where an image is, for messages."""
        return str(self.files.images / self.name(index))

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return an encoded image; raise BadSampleError if it cannot be read."""
        try:
            return np.frombuffer((self.files.images / self.name(index)).read_bytes(), dtype=np.uint8)
        except OSError as error:
            raise BadSampleError(f"{self.location(index)} cannot be read: {error.strerror}") from error

    def size(self, index: int) -> tuple[int, int]:
        """Return the annotated height and width of an image."""
        height, width = self.annotations.arrays.sizes[self.numbers[index]].tolist()
        return height, width

    def rows(self, index: int) -> slice:
        """Return which rows of the annotations are the boxes of an image."""
        number, ends = int(self.numbers[index]), self.annotations.arrays.box_ends
        return slice(int(ends[number - 1]) if number else 0, int(ends[number]))

    def boxes_to_learn(self, index: int) -> ImageBoxes:
        """Return an image's boxes, cut to the image, without those of crowds and without slivers."""
        rows, (height, width) = self.rows(index), self.size(index)
        boxes, used = _inside(self.annotations.arrays, rows, np.array([width, height]))
        return ImageBoxes(boxes[used], self.annotations.arrays.classes[rows][used])

    def without_empty(self) -> BoxList:
        """Return the images with boxes to learn."""
        arrays = self.annotations.arrays
        limits = np.repeat(arrays.sizes[:, ::-1], np.diff(arrays.box_ends, prepend=0), axis=0)
        _, used = _inside(arrays, slice(None), limits)
        before = np.concatenate([[0], np.cumsum(used)])[np.concatenate([[0], arrays.box_ends])]
        return replace(self, numbers=self.numbers[np.diff(before)[self.numbers] > 0])


def _inside(
    arrays: BoxArrays, rows: slice, limits: NDArray[np.integer[Any]]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return boxes cut to their images' widths and heights, and which of them are learned."""
    boxes = arrays.boxes[rows].clip(0, np.concatenate([limits, limits], axis=-1))
    thick = (boxes[:, 2:] - boxes[:, :2] >= _THINNEST).all(axis=1)
    return boxes, thick & ~arrays.crowd[rows]


def read_sized(images: BoxList, index: int) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    """Return an encoded image and its height and width; raise BadSampleError if the annotation differs."""
    encoded, size = read_image(images, index)
    if size != images.size(index):
        (height, width), (stated_height, stated_width) = size, images.size(index)
        raise BadSampleError(
            f"{images.location(index)} has {width} x {height} pixels, its annotation {stated_width} x "
            f"{stated_height}"
        )
    return encoded, size


def find_boxes(root: Path, split: Split) -> BoxFiles:
    """Return where a split's annotations and images are; raise UserError if there are none."""
    if not root.is_dir():
        raise UserError(f"There is no folder {root}. Give the folder of the images and boxes.")
    own = root / "boxes" / f"{split}.json"
    found = [own] if own.is_file() else sorted((root / "annotations").glob(f"instances_{split}*.json"))
    if not found:
        raise UserError(
            f"{root} has no boxes of the {split} split. Give a folder with images/{split} and "
            f"boxes/{split}.json, in COCO's form, or COCO's own with annotations/instances_{split}2017.json."
        )
    if len(found) > 1:
        raise UserError(f"{found[0].parent} has {len(found)} files instances_{split}*.json. Keep one.")
    name = found[0].stem.removeprefix("instances_")
    folders = [folder for folder in (root / name, root / "images" / name) if folder.is_dir()]
    if not folders:
        raise UserError(f"The images of {found[0]} are missing: there is no {root / 'images' / name}.")
    return BoxFiles(found[0], folders[0], split)


def list_boxes(files: BoxFiles, cache: Path | None) -> BoxList:
    """List a split's images; raise UserError if there are none, or if files are missing."""
    found = read_annotations(files.annotations, cache)
    images = BoxList(files, found, np.arange(len(found.arrays.image_ids)))
    if not len(images):
        raise UserError(f"{files.annotations} lists no images.")
    names = [images.name(index) for index in range(len(images))]
    folders = {(files.images / name).parent for name in names}
    entries = (entry for folder in folders if folder.is_dir() for entry in os.scandir(folder))
    present = {entry.path for entry in entries if entry.is_file()}
    missing = [name for name in names if str(files.images / name) not in present]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(names)} images of {files.annotations} are not in {files.images}; the "
            f"first: {missing[0]}. Add them, or remove them from the annotations."
        )
    return images


def open_boxes(files: BoxFiles, folder: Path) -> BoxList:
    """Map the list that another rank has made."""
    found = map_annotations(folder)
    return BoxList(files, found, np.arange(len(found.arrays.image_ids)))
