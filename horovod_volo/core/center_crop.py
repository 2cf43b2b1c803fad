"""The resizing and the crop of evaluation images, in pixels.

Rounding follows the evaluation transforms of timm and torchvision, which published accuracies depend on.
"""

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
