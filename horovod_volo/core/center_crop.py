"""The resizing and the crops of evaluation images, in pixels.

Rounding follows the evaluation transforms of timm and torchvision, which published accuracies depend on.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def resized_shapes(
    sizes: NDArray[np.int64], image_size: int, crop_pct: float, crop_mode: str = "center"
) -> NDArray[np.int64]:
    """Return heights and widths with the shorter side resized to floor(image_size / crop_pct), (batch, 2).

    With `crop_mode` "squash" both sides are resized to that, as in timm.
    """
    short = math.floor(image_size / crop_pct)
    return np.full_like(sizes, short) if crop_mode == "squash" else resized_to(sizes, short)


def resized_to(sizes: NDArray[np.int64], short: int) -> NDArray[np.int64]:
    """Return heights and widths with the shorter side resized to `short` pixels, (batch, 2)."""
    resized = [
        (short, int(short * width / height)) if height <= width else (int(short * height / width), short)
        for height, width in sizes.tolist()
    ]
    return np.array(resized, dtype=np.int64).reshape(-1, 2)


def crop_corners(resized: NDArray[np.int64], image_size: int) -> NDArray[np.int64]:
    """Return top and left of the crop, (batch, 2); negative where it is larger than the image."""
    margin = resized - image_size
    # torchvision rounds half to even when it cuts, and rounds the upper left border down when it pads.
    return np.where(margin >= 0, np.rint(margin / 2), -(-margin // 2)).astype(np.int64)


def view_corners(resized: NDArray[np.int64], image_size: int, crops: int) -> NDArray[np.int64]:
    """Return top and left of each of the crops of an image, (batch, crops, 2).

    They are the centre and, with 5 or 10 crops, the four corners of the image; of 10, the last five are the
    first five again, to be mirrored.
    """
    centre = crop_corners(resized, image_size)[:, None]  # (batch, 1, 2)
    if crops == 1:
        return centre
    margin = np.maximum(resized - image_size, 0)[:, None]
    ends = margin * np.array([[0, 0], [0, 1], [1, 0], [1, 1]])  # (batch, 4, 2)
    # A side that is shorter than the crop has one position, that of the centre crop.
    ends = np.where(resized[:, None] < image_size, centre, ends)
    return np.tile(np.concatenate([centre, ends], axis=1), (1, crops // 5, 1))


def is_mirrored(crop: int) -> bool:
    """Return whether a crop, by its place among those of `view_corners`, is to be mirrored."""
    return crop >= 5
