"""The batches of images with boxes that a rank trains on, and how each image is cut, flipped and coloured.

The window is SSD's: it is drawn again until all boxes overlap it by more than a limit, itself drawn, and the
centre of one or more is inside. Its corners are whole pixels, so that one affine map takes image and boxes to
the square that the network sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import cos, radians, sin
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.task_settings import Detection
from horovod_volo.core.batch import copy_async
from horovod_volo.core.rng import Purpose, uniforms
from horovod_volo.data.image_decoder import Input, resizing_inputs
from horovod_volo.data.train_transform import resize_pixels
from horovod_volo.dense.box_list import ImageBoxes, read_sized
from horovod_volo.dense.dense_batches import DenseBatches, PendingDenseBatch

# A window's limits of IoU with each box, drawn evenly; None is the whole image, -1 any window.
_LIMITS = (None, 0.1, 0.3, 0.5, 0.7, 0.9, -1.0)
_ROUNDS = 100  # then it is the whole image; one round in seven ends with that
_MOST_OBLONG = 2.0  # width over height of a window, relative to the image's, or the inverse
_FLIP = 0.5
_SIDES = 0.3, 1.0  # of a window, as fractions of the image's
_RANGES = ((0.5, 1.5), (0.5, 1.5), (0.875, 1.125))  # of the factors of saturation, contrast and brightness
_GREY = 128.0  # contrast is stretched around it
_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])


class BoxTrainLoader(DenseBatches):
    """This rank's training batches for detection.

    Targets are boxes (batch, most, 4) float32, left, top, right, bottom as fractions of the image, and
    classes (batch, most) int64 from 1. Images with fewer boxes than the most have zeros after theirs.
    """

    @property
    def _resized_by_dali(self) -> bool:
        # On the CPU torch resizes faster than DALI.
        return self._device.type == "cuda" and self._decoder.name == "dali"

    def _pipeline(self, source: Any, **settings: Any) -> Any:
        resize = self._resized_by_dali
        return self._decoder.build_train_pipeline(source, image_size=self._side, resize=resize, **settings)

    def _prepare(self, epoch: int, sample: int) -> tuple[int, NDArray[np.uint8], "BoxPlan", ImageBoxes]:
        read = partial(read_sized, self._images)
        index, (encoded, size) = self.bad_samples.read_or_replace(sample, self._samples, read)
        boxes, classes = self._images.boxes_to_learn(index)
        plan = draw_box_plan(self._config.detection, size, boxes, self._seed, epoch, sample)
        moved, stay = plan.move(boxes)
        return index, encoded, plan, ImageBoxes(moved[stay], classes[stay])

    def _inputs(self, plans: Sequence["BoxPlan"]) -> tuple[Input, ...]:
        windows = np.array([plan.window for plan in plans], dtype=np.int32)  # (images, 4)
        corners, shapes = list(windows[:, :2]), list(windows[:, 2:])
        if not self._resized_by_dali:
            return corners, shapes
        flips = np.array([plan.flip for plan in plans])
        return corners, shapes, *resizing_inputs(flips, np.zeros_like(flips), np.zeros_like(flips))

    def _collate(self, targets: Sequence[ImageBoxes]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        most = max(1, *(len(image.boxes) for image in targets))
        boxes = np.zeros((len(targets), most, 4), dtype=np.float32)
        classes = np.zeros((len(targets), most), dtype=np.int64)
        for number, image in enumerate(targets):
            boxes[number, : len(image.boxes)] = image.boxes
            classes[number, : len(image.boxes)] = image.classes + 1
        return boxes, classes

    def _transform(self, pending: PendingDenseBatch, decoded: Any) -> Tensor:
        colors = np.stack([plan.colors.affine() for plan in pending.plans]).astype(np.float32)
        maps = copy_async(colors, self._device)  # (batch, 3, 4)
        # Normalising is one more affine map: both are one product, clipped to what 0 and 255 become.
        mean, std = self._mean.flatten(1), self._std.flatten(1)  # (3, 1)
        matrix, added = maps[:, :, :3] / std, (maps[:, :, 3:] - mean) / std
        low, high = -mean / std, (255 - mean) / std
        images = torch.empty(len(matrix), 3, self._side, self._side, device=self._device)
        flat = images.flatten(2)
        if self._resized_by_dali:
            # A view of DALI's memory, valid until its next run.
            pixels = torch.utils.dlpack.from_dlpack(decoded.as_tensor())  # (batch, side, side, 3) uint8
            torch.baddbmm(added, matrix, pixels.float().flatten(1, 2).transpose(1, 2), out=flat)
            flat.clamp_(low, high)
            return images
        windows = [torch.utils.dlpack.from_dlpack(decoded[number]) for number in range(len(decoded))]

        def transform(number: int) -> None:
            """Do all work on one image while it is in a core's own cache."""
            pixels = resize_pixels(windows[number].permute(2, 0, 1)[None], self._side, bicubic=False)[0]
            levels = (pixels.flip(2) if pending.plans[number].flip else pixels).float().flatten(1)
            torch.addmm(added[number], matrix[number], levels, out=flat[number]).clamp_(low, high)

        self._transform_threads.map(transform, range(len(windows)))
        return images


class Window(NamedTuple):
    """A rectangle of whole pixels of the stored image."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class ColorChange:
    """A linear map of colours: the hue is turned and the saturation scaled, then contrast and brightness."""

    hue: float = 0.0  # degrees
    saturation: float = 1.0
    contrast: float = 1.0
    brightness: float = 1.0

    def affine(self) -> NDArray[np.float64]:
        """Return the map of levels 0 to 255, (3, 4): a matrix and, in the last column, what is added."""
        angle = radians(self.hue)
        turn = self.saturation * np.array([[cos(angle), sin(angle)], [-sin(angle), cos(angle)]])
        in_yiq = np.eye(3)
        in_yiq[1:, 1:] = turn
        matrix = self.brightness * self.contrast * np.linalg.inv(_TO_YIQ) @ in_yiq @ _TO_YIQ
        return np.hstack([matrix, np.full((3, 1), self.brightness * (1 - self.contrast) * _GREY)])


@dataclass(frozen=True, eq=False)
class BoxPlan:
    window: Window
    flip: bool
    colors: ColorChange

    def move(self, boxes: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Return boxes of the image, in pixels, as fractions of the result, and which of them stay.

        Those whose centre is in the window stay; what sticks out is cut off.
        """
        top, left, height, width = self.window
        moved = (boxes - [left, top, left, top]) / [width, height, width, height]
        if self.flip:
            moved[:, [0, 2]] = 1 - moved[:, [2, 0]]
        centres = (moved[:, :2] + moved[:, 2:]) / 2
        inside = (centres > 0) & (centres < 1)
        return moved.clip(0, 1), np.asarray(inside.all(axis=1))


def draw_box_plan(
    settings: Detection, size: tuple[int, int], boxes: NDArray[np.float64], seed: int, epoch: int, sample: int
) -> BoxPlan:
    """Draw the plan of one image of this height and width."""
    flip, *colors = uniforms(5, Purpose.BOX_PLAN, seed, epoch, sample)
    ranges = ((-settings.hue, settings.hue), *_RANGES)
    drawn = [low + (high - low) * number for (low, high), number in zip(ranges, colors, strict=True)]
    window = _draw_window(size, boxes, (seed, epoch, sample))
    return BoxPlan(window, flip < _FLIP, ColorChange(*drawn))


def _draw_window(size: tuple[int, int], boxes: NDArray[np.float64], counters: tuple[int, int, int]) -> Window:
    (low, high), whole = _SIDES, Window(0, 0, *size)
    for number in range(_ROUNDS if len(boxes) else 0):
        choice, *drawn = uniforms(5, Purpose.BOX_WINDOW, *counters, number)
        limit = _LIMITS[int(choice * len(_LIMITS))]
        if limit is None:
            break
        height, width = (low + (high - low) * each for each in drawn[:2])
        if not 1 / _MOST_OBLONG <= width / height <= _MOST_OBLONG:
            continue
        window = _in_pixels(size, (height, width), (drawn[2] * (1 - height), drawn[3] * (1 - width)))
        if _suits(window, boxes, limit):
            return window
    return whole


def _in_pixels(size: tuple[int, int], shape: tuple[float, float], corner: tuple[float, float]) -> Window:
    """Return a window given in fractions of the image."""
    begins = [round(first * side) for first, side in zip(corner, size, strict=True)]
    ends = [round((first + part) * side) for first, part, side in zip(corner, shape, size, strict=True)]
    lengths = [max(1, end - begin) for begin, end in zip(begins, ends, strict=True)]
    top, left = (min(begin, side - 1) for begin, side in zip(begins, size, strict=True))
    return Window(top, left, min(lengths[0], size[0] - top), min(lengths[1], size[1] - left))


def _suits(window: Window, boxes: NDArray[np.float64], limit: float) -> bool:
    begin = np.array([window.left, window.top], dtype=np.float64)
    end = begin + np.array([window.width, window.height])
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    if not ((centres > begin) & (centres < end)).all(axis=1).any():
        return False
    common = (np.minimum(boxes[:, 2:], end) - np.maximum(boxes[:, :2], begin)).clip(min=0).prod(axis=1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    return bool((common > limit * (areas + window.width * window.height - common)).all())
