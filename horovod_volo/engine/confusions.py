"""The classes with the lowest accuracy of an evaluation: what they are taken for, and images that were wrong.

confusions.json in the run folder and the picture `worst_confusions` in TensorBoard show them. Both are a
function of the predictions of all held-out images, so they do not depend on the number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from horovod_volo.core.batch import NO_CLASS
from horovod_volo.core.errors import BadSampleError
from horovod_volo.data.reading import ImageFiles, decode_rgb
from horovod_volo.monitor.pictures import Picture, encoded_picture

CONFUSIONS = "confusions.json"
WORST_CLASSES, WRONG_IMAGES = 20, 4
_DRAWN_CLASSES = 8
_SIDE, _GAP, _LINE = 128, 12, 16  # pixels of the picture: a cell, the space around it, a line of text
_LETTERS = 22  # of a name, under an image

Confusions = dict[str, Any]  # the content of confusions.json


class HeldOutImages(ImageFiles, Protocol):
    """The held-out images, with their classes."""

    classes: tuple[str, ...]
    targets: NDArray[np.int32]  # (images,)
    digest: str

    def name(self, index: int) -> str:
        """Return the name of an image."""


class ConfusionRecorder:
    """Keeps the confusions of the better one of the networks that were evaluated at a step."""

    def __init__(self, images: HeldOutImages | None) -> None:
        """`images` is None on ranks that write nothing."""
        self._images = images
        self._best: Confusions = {}
        self._is_reported = False

    def add(self, predictions: NDArray[np.int64], probabilities: NDArray[np.float32]) -> None:
        """Add an evaluation: the predicted class of every image and its probability, both (images,)."""
        if self._images is None:
            return
        if self._is_reported:  # this one is of a later step
            self._best, self._is_reported = {}, False
        found = find_confusions(self._images, predictions, probabilities)
        if not self._best or found["top1"] > self._best["top1"]:
            self._best = found

    def files(self, step: int) -> Mapping[str, str]:
        """Return the file for the run folder, of the evaluation at this step."""
        self._is_reported = True
        return {CONFUSIONS: json.dumps({"step": step, **self._best}, indent=1)} if self._best else {}

    def pictures(self) -> Mapping[str, Picture]:
        """Return the picture; none, if nothing was wrong or no image that was wrong can be read."""
        self._is_reported = True
        sheet = draw_confusions(self._images, self._best) if self._images and self._best else None
        return {"worst_confusions": sheet} if sheet else {}


def find_confusions(
    images: HeldOutImages, predictions: NDArray[np.int64], probabilities: NDArray[np.float32]
) -> Confusions:
    """Return the classes of lowest accuracy, with the images that were wrong with the highest probability."""
    targets, classes = np.asarray(images.targets), images.classes
    results = class_results(classes, targets, predictions)
    number_of = {name: number for number, name in enumerate(classes)}
    worst = [result for result in results if result.right < result.images][:WORST_CLASSES]
    seen = predictions != NO_CLASS
    wrong = seen & (predictions != targets)
    rows = []
    for result in worst:
        own = np.flatnonzero(wrong & (targets == number_of[result.name]))
        # Rounded, because a probability differs in its last bits with the batch that an image is in; of equal
        # ones, the stable sort takes the first image of the list.
        own = own[np.argsort(-probabilities[own].round(3), kind="stable")][:WRONG_IMAGES]
        rows.append(
            result._asdict()
            | {
                "wrong": [
                    {
                        "index": index,
                        "name": images.name(index),
                        "location": images.location(index),
                        "taken_for": classes[predictions[index]],
                        "probability": round(float(probabilities[index]), 3),
                    }
                    for index in own.tolist()
                ]
            }
        )
    right = int((seen & ~wrong).sum())
    return {
        "top1": 100 * right / max(1, int(seen.sum())),
        "images": int(seen.sum()),
        "classes": len(classes),
        "image_list": images.digest,
        "worst": rows,
    }


def draw_confusions(images: ImageFiles, confusions: Confusions) -> Picture | None:
    """Return a sheet with a row for each of the worst classes; None if there is no image to show."""
    rows = [(row, _thumbnails(images, row["wrong"])) for row in confusions["worst"][:_DRAWN_CLASSES]]
    rows = [(row, shown) for row, shown in rows if shown]
    if not rows:
        return None
    height = _SIDE + 3 * _LINE + _GAP
    size = WRONG_IMAGES * (_SIDE + _GAP) + _GAP, len(rows) * height + _GAP
    sheet = Image.new("RGB", size, "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for number, (row, shown) in enumerate(rows):
        top = _GAP + number * height
        title = f"{row['name']}: {row['right']} of {row['images']} right"
        draw.text((_GAP, top), _printable(title, 4 * _LETTERS), fill="black", font=font)
        for column, (image, wrong) in enumerate(shown):
            left = _GAP + column * (_SIDE + _GAP)
            sheet.paste(image, (left, top + _LINE + (_SIDE - image.height) // 2))
            lines = (wrong["taken_for"], f"{100 * wrong['probability']:.0f} %")
            for line, text in enumerate(lines):
                below = top + _SIDE + (1 + line) * _LINE
                draw.text((left, below), _printable(text, _LETTERS), fill="#a01010", font=font)
    return encoded_picture(sheet)


def _thumbnails(images: ImageFiles, wrong: list[dict[str, Any]]) -> list[tuple[Image.Image, dict[str, Any]]]:
    shown = []
    for each in wrong:
        try:
            shown.append((thumbnail(images, each["index"], (_SIDE, _SIDE)), each))
        except BadSampleError:  # it has gone, or was damaged, since it was evaluated
            continue
    return shown


def thumbnail(images: ImageFiles, index: int, size: tuple[int, int]) -> Image.Image:
    """Return an image that fits into `size`, where small ones are enlarged; raise BadSampleError."""
    image = Image.fromarray(decode_rgb(images, index))
    factor = min(size[0] / image.width, size[1] / image.height)
    fitted = max(1, round(factor * image.width)), max(1, round(factor * image.height))
    return image.resize(fitted, Image.Resampling.LANCZOS)


def _printable(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


class ClassResult(NamedTuple):
    """The result of one class."""

    name: str
    images: int  # without damaged ones
    right: int  # images that are predicted correctly
    mistaken_for: str  # the most frequent wrong prediction; empty: there is none
    mistaken: int  # images with that prediction

    @property
    def top1(self) -> float:
        """Return the accuracy in per cent; 0 without images."""
        return 100 * self.right / max(1, self.images)


def class_results(
    classes: Sequence[str], targets: NDArray[np.integer[Any]], predictions: NDArray[np.integer[Any]]
) -> list[ClassResult]:
    """Return each class's result, the worst first, from the true and the predicted class of each image."""
    valid = predictions != NO_CLASS
    # Count (target, prediction) pairs: a confusion matrix would grow with the square of the classes.
    pairs = np.stack([targets[valid], predictions[valid]], axis=1)
    pairs, counts = np.unique(pairs, axis=0, return_counts=True)
    images, right = np.zeros(len(classes), np.int64), np.zeros(len(classes), np.int64)
    mistaken, mistaken_for = np.zeros(len(classes), np.int64), np.full(len(classes), NO_CLASS)
    for (target, prediction), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        images[target] += count
        if prediction == target:
            right[target] = count
        elif count > mistaken[target]:  # if several are equally frequent, the first class
            mistaken[target], mistaken_for[target] = count, prediction
    results = [
        ClassResult(
            name,
            int(images[number]),
            int(right[number]),
            classes[mistaken_for[number]] if mistaken[number] else "",
            int(mistaken[number]),
        )
        for number, name in enumerate(classes)
    ]
    return sorted(results, key=lambda result: (result.images == 0, result.top1))
