"""The list of a split's images and boxes, in the layout of COCO or of one's own data:

annotations/instances_{train,val}2017.json    {train,val}2017/NAME.jpg, or in images/
boxes/{train,val}.json                        images/{train,val}/NAME.jpg

COCO's JSON takes gigabytes to read: rank 0 reads it into arrays, for all ranks.

Invariant: images ascend with their ids; the boxes of an image are in the order of the file. Classes count
from 0, in the order of the categories' ids, which may have gaps.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.split_folder import Split
from horovod_volo.data.reading import read_image
from horovod_volo.dense.scene_list import file_content

_THINNEST = 0.1  # pixels; thinner boxes are not learned
_MOST_CLASSES = 2**15 - 1

Records = list[dict[str, Any]]  # of COCO's JSON


@dataclass(frozen=True, eq=False)
class Annotations:
    names: NDArray[np.uint8]  # of the images, one after the other
    name_ends: NDArray[np.int64]  # (images,)
    image_ids: NDArray[np.int64]  # (images,)
    sizes: NDArray[np.int32]  # (images, 2) height, width
    box_ends: NDArray[np.int64]  # (images,)
    boxes: NDArray[np.float64]  # (boxes, 4) left, top, right, bottom in pixels, as annotated
    classes: NDArray[np.int16]  # (boxes,)
    crowd: NDArray[np.bool_]  # (boxes,) one box around many objects
    areas: NDArray[np.float64]  # (boxes,) square pixels; in COCO those of the objects' outlines
    class_names: tuple[str, ...]
    category_ids: tuple[int, ...]  # of the classes, as results name them

    def digest(self) -> str:
        """Return a checksum of all arrays."""
        checksum = hashlib.sha256()
        for value in (getattr(self, field.name) for field in fields(self)):
            if isinstance(value, np.ndarray):
                checksum.update(np.ascontiguousarray(value).tobytes())
        return checksum.hexdigest()


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
        return self.annotations.class_names

    @cached_property
    def digest(self) -> str:
        """Return a checksum of the annotations and of the choice of images."""
        listed = self.annotations.digest().encode() + np.ascontiguousarray(self.numbers).tobytes()
        return hashlib.sha256(listed).hexdigest()

    def close(self) -> None:
        """Close nothing: files are opened one by one."""

    def name(self, index: int) -> str:
        number, annotations = int(self.numbers[index]), self.annotations
        begin = int(annotations.name_ends[number - 1]) if number else 0
        return os.fsdecode(annotations.names[begin : int(annotations.name_ends[number])].tobytes())

    def location(self, index: int) -> str:
        return str(self.files.images / self.name(index))

    def read(self, index: int) -> NDArray[np.uint8]:
        return np.frombuffer(file_content(self.location(index)), dtype=np.uint8)

    def size(self, index: int) -> tuple[int, int]:
        """Return the annotated height and width of an image."""
        height, width = self.annotations.sizes[self.numbers[index]].tolist()
        return height, width

    def rows(self, index: int) -> slice:
        """Return which rows of the annotations are the boxes of an image."""
        number, ends = int(self.numbers[index]), self.annotations.box_ends
        return slice(int(ends[number - 1]) if number else 0, int(ends[number]))

    def boxes_to_learn(self, index: int) -> ImageBoxes:
        """Return an image's boxes, cut to the image, without those of crowds and without slivers."""
        rows, (height, width) = self.rows(index), self.size(index)
        boxes, used = _inside(self.annotations, rows, np.array([width, height]))
        return ImageBoxes(boxes[used], self.annotations.classes[rows][used])

    def without_empty(self) -> "BoxList":
        """Return the images with boxes to learn."""
        sizes, ends = self.annotations.sizes, self.annotations.box_ends
        limits = np.repeat(sizes[:, ::-1], np.diff(ends, prepend=0), axis=0)
        _, used = _inside(self.annotations, slice(None), limits)
        before = np.concatenate([[0], np.cumsum(used)])[np.concatenate([[0], ends])]
        return replace(self, numbers=self.numbers[np.diff(before)[self.numbers] > 0])


def _inside(
    annotations: Annotations, rows: slice, limits: NDArray[np.integer[Any]]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return boxes cut to their images' widths and heights, and which of them are learned."""
    boxes = annotations.boxes[rows].clip(0, np.concatenate([limits, limits], axis=-1))
    thick = (boxes[:, 2:] - boxes[:, :2] >= _THINNEST).all(axis=1)
    return boxes, thick & ~annotations.crowd[rows]


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


def list_boxes(root: Path, split: Split) -> BoxList:
    """List a split's images; raise UserError if there are none, or if files are missing."""
    files = find_boxes(root, split)
    found = read_annotations(files.annotations)
    images = BoxList(files, found, np.arange(len(found.image_ids)))
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


def read_annotations(path: Path) -> Annotations:
    """Read a file in COCO's form; raise UserError if it is not one."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}. Copy it again.") from None
    try:
        images = sorted(content["images"], key=lambda image: image["id"])
        categories = sorted(content["categories"], key=lambda category: category["id"])
        return _annotations(path, images, categories, content["annotations"])
    except (KeyError, TypeError, AttributeError, OverflowError, ValueError) as error:
        raise UserError(
            f"{path} is not in COCO's form ({type(error).__name__}: {error}): it needs images (id, "
            "file_name, height, width), annotations (image_id, category_id, bbox) and categories (id, name)."
        ) from None


def _annotations(path: Path, images: Records, categories: Records, annotations: Records) -> Annotations:
    ids = np.array([image["id"] for image in images], dtype=np.int64)
    category_ids = [int(category["id"]) for category in categories]
    class_names = [str(category["name"]) for category in categories]
    if not 0 < len(categories) <= _MOST_CLASSES or len(set(category_ids)) < len(category_ids):
        raise UserError(
            f"{path} names {len(categories)} categories; give 1 to {_MOST_CLASSES}, each id once."
        )
    if len(np.unique(ids)) < len(ids):
        raise UserError(f"{path} lists an image twice. Give each image an id of its own.")
    names = [os.fsencode(image["file_name"]) for image in images]
    numbers = {category: number for number, category in enumerate(category_ids)}
    positions = {int(image): position for position, image in enumerate(ids)}
    count = len(annotations)
    of_image = np.array([positions.get(each["image_id"], -1) for each in annotations], dtype=np.int64)
    classes = np.array([numbers.get(each["category_id"], -1) for each in annotations], dtype=np.int16)
    boxes = np.array([each["bbox"] for each in annotations], dtype=np.float64).reshape(count, 4)
    for wrong, what in (
        (of_image < 0, "is of an image that is not listed"),
        (classes < 0, "is of a category that is not listed"),
        (~np.isfinite(boxes).all(axis=1) | (boxes[:, 2:] < 0).any(axis=1), "has no finite width and height"),
    ):
        if wrong.any():
            first = annotations[int(wrong.argmax())]
            raise UserError(
                f"{path}: {int(wrong.sum())} of {count} boxes cannot be used; the first {what}: image "
                f"{first['image_id']}, category {first['category_id']}, bbox {first['bbox']}. Correct them."
            )
    areas = [each.get("area", each["bbox"][2] * each["bbox"][3]) for each in annotations]
    crowd = np.array([bool(each.get("iscrowd", 0)) for each in annotations], dtype=np.bool_)
    order = np.argsort(of_image, kind="stable")
    return Annotations(
        names=np.frombuffer(b"".join(names), dtype=np.uint8),
        name_ends=np.cumsum([len(name) for name in names], dtype=np.int64),
        image_ids=ids,
        sizes=np.array([(image["height"], image["width"]) for image in images], np.int32).reshape(-1, 2),
        box_ends=np.searchsorted(of_image[order], np.arange(len(ids)), side="right").astype(np.int64),
        boxes=np.hstack([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]])[order],
        classes=classes[order],
        crowd=crowd[order],
        areas=np.array(areas, dtype=np.float64)[order],
        class_names=tuple(class_names),
        category_ids=tuple(category_ids),
    )
