"""How an evaluation image is resized and which window of it is seen.

These are the numbers of timm's and torchvision's evaluation transform, its roundings included:
published accuracies were measured with them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def resized_shapes(sizes: NDArray[np.int64], image_size: int, crop_pct: float) -> NDArray[np.int64]:
    """Return heights and widths after the shorter side became floor(image_size / crop_pct)."""
    return resized_to(sizes, math.floor(image_size / crop_pct))


def resized_to(sizes: NDArray[np.int64], short: int) -> NDArray[np.int64]:
    """Return heights and widths after the shorter side became `short`."""
    resized = [
        (short, int(short * width / height)) if height <= width else (int(short * height / width), short)
        for height, width in sizes.tolist()
    ]
    return np.array(resized, dtype=np.int64).reshape(-1, 2)  # (batch, 2)


def crop_corners(resized: NDArray[np.int64], image_size: int) -> NDArray[np.int64]:
    """Return top and left of the centre window; negative where the image is smaller than it."""
    room = resized - image_size
    # Rounding to even where there is too much, rounding the border down where there is too little.
    return np.where(room >= 0, np.rint(room / 2), -(-room // 2)).astype(np.int64)  # (batch, 2)
