"""Pictures of images beside what is true of them and what was predicted, for people to look at."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.batch import IGNORED
from horovod_volo.data.reading import decode_rgb
from horovod_volo.dense.average_precision import BoxPredictions
from horovod_volo.dense.box_list import BoxList
from horovod_volo.dense.scene_list import SceneList
from horovod_volo.monitor.logger import Picture
from horovod_volo.monitor.pictures import class_colors, encoded_picture

_HIGHEST = 256  # pixels
_LEAST_SCORE = 0.3  # of the boxes that are drawn

Labelled = tuple[NDArray[np.floating], int, str]  # a box in pixels, its class and a label


class EvaluationPictures:
    def __init__(self, most: int) -> None:
        """`most` is the number of images; 0 on ranks that write nothing."""
        self._most = most
        self.latest: dict[int, Picture] = {}  # by the numbers of their images

    def wants(self, number: int) -> bool:
        """Return whether an image is to be drawn."""
        return len(self.latest) < self._most or number in self.latest

    def add_masks(self, number: int, pixels: Tensor, *masks: Tensor) -> None:
        """Draw an image (3, height, width) beside its mask and its predicted classes."""
        colors = class_colors()
        drawn = [colors[classes.to(torch.uint8).cpu().numpy()] for classes in masks]
        self.latest[number] = _encoded([pixels.permute(1, 2, 0).numpy(), *drawn])

    def add_boxes(self, images: BoxList, number: int, found: BoxPredictions) -> None:
        """Draw an image with its true boxes beside one with those that were found."""
        pixels, rows = decode_rgb(images, number), images.rows(number)
        truths, names = images.annotations, images.classes
        pairs = zip(truths.boxes[rows], truths.classes[rows].tolist(), strict=True)
        labelled = [[(box, kind, names[kind]) for box, kind in pairs], list[Labelled]()]
        for _, box, kind, score in zip(*found, strict=True):
            if score > _LEAST_SCORE:
                labelled[1].append((box, int(kind), f"{names[kind]} {score:.2f}"))
        self.latest[number] = _encoded([_with_boxes(pixels, each) for each in labelled])


def _with_boxes(pixels: NDArray[np.uint8], boxes: Iterable[Labelled]) -> NDArray[np.uint8]:
    # Small images are enlarged, so that labels can be read.
    factor = max(1, _HIGHEST // max(pixels.shape[:2]))
    image = Image.fromarray(pixels.repeat(factor, axis=0).repeat(factor, axis=1))
    draw, colors = ImageDraw.Draw(image), class_colors()
    for box, kind, label in boxes:
        left, top, right, bottom = (factor * float(side) for side in box)
        color = tuple(colors[kind % IGNORED].tolist())
        draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=color, width=2)
        draw.text((left + 3, top + 1), label, fill=color, stroke_width=1, stroke_fill=(0, 0, 0))
    return np.asarray(image)


def _encoded(parts: list[NDArray[np.uint8]]) -> Picture:
    image = Image.fromarray(np.concatenate(parts, axis=1))
    if image.height > _HIGHEST:
        image = image.resize((max(1, image.width * _HIGHEST // image.height), _HIGHEST))
    return encoded_picture(image)


def write_prediction(folder: Path, scenes: SceneList, number: int, predicted: Tensor) -> None:
    """Write the classes of an image, in ADE20K's layout counted from 1 as its server wants them."""
    classes = predicted.to(torch.uint8).cpu().numpy() + np.uint8(scenes.layout.zero_is_ignored)
    image = Image.fromarray(classes, mode="P")
    image.putpalette(class_colors().ravel().tolist())
    path = (folder / scenes.names[number]).with_suffix(".png")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        image.save(file, format="PNG")
