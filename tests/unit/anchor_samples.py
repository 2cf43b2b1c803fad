"""Anchors of SSD300 and a few others for loops in Python, and the IoU of two boxes."""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod_volo.dense.anchors import SSD300, AnchorRule, build_anchors

OF_300 = build_anchors(SSD300)
# Few anchors, for loops in Python: 4 x 25 + 6 x 9 + 4.
SMALL = build_anchors(
    AnchorRule(
        image_size=100,
        sides=(5, 3, 1),
        steps=(20.0, 34.0, 100.0),
        sizes=(16.0, 33.0, 60.0, 95.0),
        ratios=((2.0,), (2.0, 3.0), (2.0,)),
    )
)


def iou_of(first: Any, second: Any) -> Any:
    """Return the IoU of two boxes of four numpy scalars."""
    width = max(min(first[2], second[2]) - max(first[0], second[0]), np.float32(0))
    height = max(min(first[3], second[3]) - max(first[1], second[1]), np.float32(0))
    areas = [(right - left) * (bottom - top) for left, top, right, bottom in (first, second)]
    return width * height / (areas[0] + areas[1] - width * height)
