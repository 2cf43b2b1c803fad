"""The shapes that are the classes of the demo set.

A shape is a function of points (x, y) that returns a mask of the points inside; some have a second colour.
Invariant: a shape lies within the unit circle, and its mirror image is of the same class, because training
flips images.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import cos, pi, sin

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]


def _disc(x: Floats, y: Floats) -> Mask:
    return x * x + y * y < 1


def _crescent(x: Floats, y: Floats) -> Mask:
    return _disc(x, y) & ((x - 0.45) ** 2 + y * y > 0.78**2)


def _cross(x: Floats, y: Floats) -> Mask:
    near, far = np.minimum(np.abs(x), np.abs(y)), np.maximum(np.abs(x), np.abs(y))
    return (near < 0.27) & (far < 0.95)


def _frame(x: Floats, y: Floats) -> Mask:
    distance = np.maximum(np.abs(x), np.abs(y))
    return (distance < 0.71) & (distance > 0.4)


def _heart(x: Floats, y: Floats) -> Mask:
    x, y = 1.25 * x, 1.25 * y + 0.25
    return (x * x + y * y - 1) ** 3 < x * x * y**3


def _ring(x: Floats, y: Floats) -> Mask:
    return _disc(x, y) & ~_disc(x / 0.58, y / 0.58)


def _spiral(x: Floats, y: Floats) -> Mask:
    turns = 2 * np.hypot(x, y) - np.arctan2(y, x) / (2 * pi)
    return _disc(x, y) & (turns % 1 < 0.5)


def _star(x: Floats, y: Floats) -> Mask:
    # Fold the five points onto one half point, whose tip is at (1, 0); one straight edge bounds it.
    half = pi / 5
    angle = np.abs((np.arctan2(y, x) + half) % (2 * half) - half)
    radius = np.hypot(x, y)
    notch_x, notch_y = 0.45 * cos(half), 0.45 * sin(half)
    along, across = radius * np.cos(angle), radius * np.sin(angle)
    return (1 - along) * notch_y > across * (1 - notch_x)


def _triangle(x: Floats, y: Floats) -> Mask:
    inside: Mask = np.maximum(-y, 0.5 * y + 0.75**0.5 * np.abs(x)) < 0.5
    return inside


SHAPES: dict[str, Callable[[Floats, Floats], Mask]] = {
    "checker": _disc,
    "crescent": _crescent,
    "cross": _cross,
    "frame": _frame,
    "heart": _heart,
    "ring": _ring,
    "spiral": _spiral,
    "star": _star,
    "stripes": _disc,
    "triangle": _triangle,
}
# The points in the second colour, of shapes that have one.
PATTERNS: dict[str, Callable[[Floats, Floats], Mask]] = {
    "checker": lambda x, y: (np.floor(2 * x) + np.floor(2 * y)) % 2 == 0,
    "stripes": lambda _, y: np.floor(2.5 * y + 0.5) % 2 == 0,
}
# Class numbers are indices into the sorted folder names.
CLASSES = tuple(sorted(SHAPES))


@cache
def area_in_unit_circle(name: str) -> float:
    """Return the area of a shape, measured on a fine grid."""
    steps = np.arange(-0.9975, 1, 0.005, dtype=np.float32)
    x, y = np.meshgrid(steps, steps)
    return 4 * float(SHAPES[name](x, y).mean())
