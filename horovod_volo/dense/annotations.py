"""Boxes and their images as arrays, read from JSON in COCO's form.

COCO's JSON takes tens of seconds and gigabytes to read, so that rank 0 reads it once and writes the arrays
into a folder; all ranks map them. A later run on the same file finds that folder. Folders are never deleted,
because another run may use them, and on NFS that would take mapped arrays away: a damaged one is renamed.

Invariant: images ascend with their ids; the boxes of an image are in the order of the file. Classes count
from 0, in the order of the categories' ids, which may have gaps.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.errors import UserError

_EDITION = 1  # increase when the arrays change, so that folders of earlier versions are not read
_ABOUT = "about.json"
_MOST_CLASSES = 2**15 - 1


@dataclass(frozen=True, eq=False)
class BoxArrays:
    """The annotations of a split."""

    names: NDArray[np.uint8]  # of the images, one after the other
    name_ends: NDArray[np.int64]  # (images,)
    image_ids: NDArray[np.int64]  # (images,)
    sizes: NDArray[np.int32]  # (images, 2) height, width
    box_ends: NDArray[np.int64]  # (images,)
    boxes: NDArray[np.float64]  # (boxes, 4) left, top, right, bottom in pixels, as annotated
    classes: NDArray[np.int16]  # (boxes,)
    crowd: NDArray[np.bool_]  # (boxes,) one box around many objects
    areas: NDArray[np.float64]  # (boxes,) square pixels; in COCO those of the objects' outlines

    def digest(self) -> str:
        """Return a checksum of all arrays."""
        checksum = hashlib.sha256()
        for field in fields(self):
            checksum.update(np.ascontiguousarray(getattr(self, field.name)).tobytes())
        return checksum.hexdigest()


@dataclass(frozen=True, eq=False)
class Annotations:
    """The arrays of a split, its classes, and what identifies them."""

    arrays: BoxArrays
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]  # of the classes, as results name them
    digest: str
    folder: Path | None = None  # with the arrays; None: they are in memory


def read_annotations(path: Path, cache: Path | None) -> Annotations:
    """Read a file of annotations, or the arrays that an earlier run wrote into a folder of `cache`."""
    if cache is None:
        return parse_annotations(path)
    folder = cache / f"boxes-{_key(path)}"
    if found := _map_intact(folder):
        return found
    name = uuid.uuid4().hex
    partial = folder.with_name(f"{folder.name}.partial-{name}")
    try:
        _write(parse_annotations(path), partial)
        try:
            partial.rename(folder)
        except OSError:  # there is one
            if _map_intact(folder) is None:  # otherwise another run has written it meanwhile
                folder.rename(folder.with_name(f"{folder.name}.damaged-{name}"))
                partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return map_annotations(folder)


def _map_intact(folder: Path) -> Annotations | None:
    """Map the arrays in a folder; return None if they are damaged or not there."""
    try:
        found = map_annotations(folder)
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return None
    return found if found.arrays.digest() == found.digest else None


def map_annotations(folder: Path) -> Annotations:
    """Map the arrays in a folder into memory."""
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    arrays = {field.name: np.load(folder / f"{field.name}.npy", "r") for field in fields(BoxArrays)}
    return Annotations(
        BoxArrays(**arrays),
        tuple(about["classes"]),
        tuple(about["category_ids"]),
        about["digest"],
        folder,
    )


def _write(found: Annotations, folder: Path) -> None:
    folder.mkdir(parents=True)
    for field in fields(BoxArrays):
        np.save(folder / f"{field.name}.npy", getattr(found.arrays, field.name))
    about = {"classes": found.classes, "category_ids": found.category_ids, "digest": found.digest}
    (folder / _ABOUT).write_text(json.dumps(about), encoding="utf-8")


def _key(path: Path) -> str:
    state = path.stat()
    identity = f"{_EDITION} {path.resolve()} {state.st_size} {state.st_mtime_ns}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def parse_annotations(path: Path) -> Annotations:
    """Read a file in COCO's form; raise UserError if it is not one."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}. Copy it again.") from None
    try:
        images = sorted(content["images"], key=lambda image: image["id"])
        categories = sorted(content["categories"], key=lambda category: category["id"])
        annotations = content["annotations"]
        return _arrays(path, images, categories, annotations)
    except (KeyError, TypeError, AttributeError, OverflowError, ValueError) as error:
        raise UserError(
            f"{path} is not in COCO's form ({type(error).__name__}: {error}): it needs images (id, "
            "file_name, height, width), annotations (image_id, category_id, bbox) and categories (id, name)."
        ) from None


def _arrays(
    path: Path,
    images: list[dict[str, Any]],
    categories: list[dict[str, Any]],
    annotations: list[dict[str, Any]],
) -> Annotations:
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
    areas = np.array(
        [each.get("area", each["bbox"][2] * each["bbox"][3]) for each in annotations], dtype=np.float64
    )
    crowd = np.array([bool(each.get("iscrowd", 0)) for each in annotations], dtype=np.bool_)
    order = np.argsort(of_image, kind="stable")
    arrays = BoxArrays(
        names=np.frombuffer(b"".join(names), dtype=np.uint8),
        name_ends=np.cumsum([len(name) for name in names], dtype=np.int64),
        image_ids=ids,
        sizes=np.array([(image["height"], image["width"]) for image in images], np.int32).reshape(-1, 2),
        box_ends=np.searchsorted(of_image[order], np.arange(len(ids)), side="right").astype(np.int64),
        boxes=np.hstack([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]])[order],
        classes=classes[order],
        crowd=crowd[order],
        areas=areas[order],
    )
    digest = arrays.digest()
    return Annotations(arrays, tuple(class_names), tuple(category_ids), digest)
