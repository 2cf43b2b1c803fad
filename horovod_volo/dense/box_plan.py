"""How an image with boxes is cut, flipped and coloured: a function of (seed, epoch, sample) and of the boxes.

The window is SSD's: it is drawn again until all boxes overlap it by more than a limit, itself drawn, and the
centre of one or more is inside. Its corners are whole pixels, so that one affine map takes image and boxes to
the square that the network sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, radians, sin
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.config.dense_settings import Detection
from horovod_volo.core.rng import Purpose, uniforms

# A window's limits of IoU with each box, drawn evenly; None is the whole image, -1 any window.
_LIMITS = (None, 0.1, 0.3, 0.5, 0.7, 0.9, -1.0)
_ROUNDS = 100  # then it is the whole image; one round in seven ends with that
_MOST_OBLONG = 2.0  # width over height of a window, relative to the image's, or the inverse
_FLIP = 0.5
_GREY = 128.0  # contrast is stretched around it
_TO_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.321], [0.211, -0.523, 0.311]])


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
        added = np.full((3, 1), self.brightness * (1 - self.contrast) * _GREY)
        return np.hstack([matrix, added])


@dataclass(frozen=True)
class BoxPlan:
    """What is done to one image and its boxes."""

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
    ranges = (
        (-settings.hue, settings.hue),
        settings.saturation_range,
        settings.contrast_range,
        settings.brightness_range,
    )
    drawn = [low + (high - low) * number for (low, high), number in zip(ranges, colors, strict=True)]
    window = _draw_window(settings, size, boxes, (seed, epoch, sample))
    return BoxPlan(window, flip < _FLIP, ColorChange(*drawn))


def _draw_window(
    settings: Detection, size: tuple[int, int], boxes: NDArray[np.float64], counters: tuple[int, int, int]
) -> Window:
    whole = Window(0, 0, *size)
    low, high = settings.crop_sides
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
