"""Which part of its image a label map covers: the whole, or the centre crop of an evaluation transform.

A centre crop "centre-crop:RESIZE:SIZE" is what timm and torchvision cut for evaluation: the shorter side
resized to RESIZE pixels, then the square of SIZE pixels in the middle, with black borders where SIZE is the
larger. Their roundings are repeated, so nothing of where a map lies is approximated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.errors import UserError
from horovod_volo.data.center_crop import crop_corners, resized_to

CENTRE_CROP = "centre-crop"


@dataclass(frozen=True)
class MapGeometry:
    """Where the label maps of a set lie in their images; `resize` 0: they cover whole images."""

    resize: int = 0  # pixels that the shorter side is resized to
    size: int = 0  # pixels a side of the square that is cut from the middle then

    @classmethod
    def parse(cls, text: str) -> MapGeometry:
        """Read what `str` writes."""
        if text == "whole":
            return cls()
        found = re.fullmatch(rf"{CENTRE_CROP}:([1-9]\d*):([1-9]\d*)", text)
        if found is None:
            raise UserError(
                f"{text!r} is no geometry of label maps. Give --map-geometry whole, or {CENTRE_CROP}:"
                "RESIZE:SIZE with the pixels of the resized shorter side and of the square cut from its "
                f"middle, as in {PUBLISHED}."
            )
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{CENTRE_CROP}:{self.resize}:{self.size}" if self.resize else "whole"

    @property
    def described(self) -> str:
        """Tell it in words."""
        return f"the image's centre crop ({self})" if self.resize else "the whole image"

    def covered(self, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return top, left, height and width of what maps cover, (batch, 4), as fractions of the images.

        `sizes` (batch, 2) are the images' heights and widths. A crop with borders begins below 0 and ends
        beyond 1.
        """
        if not self.resize:
            return np.tile([0.0, 0.0, 1.0, 1.0], (len(sizes), 1))
        resized = resized_to(sizes, self.resize)
        square = [crop_corners(resized, self.size), np.full_like(resized, self.size)]
        return np.concatenate(square, axis=1) / np.tile(resized, 2)


WHOLE = MapGeometry()
# The published generator's transform, at the size and --crop-pct 1.0 of its published command.
PUBLISHED = MapGeometry(576, 576)


def assumed_geometry(height: int, width: int) -> MapGeometry:
    """Return what maps of so many cells in the published form cover, where nothing tells."""
    return PUBLISHED if height == width else WHOLE


def coverage(geometry: MapGeometry, *, assumed: bool) -> str:
    """Tell what a map covers, and whether that was only assumed."""
    return f"{geometry.described}{', as is assumed' if assumed else ''}"


def assumption(folder: object, geometry: MapGeometry) -> str:
    """Say that a geometry was assumed, why, and how to test it."""
    reason = (
        "the published generator labels that crop, which its evaluation transform cuts, and the files "
        "themselves do not tell"
        if geometry.resize
        else "they are not square, as maps of a centre crop are"
    )
    return (
        f"a label map in {folder} is assumed to cover {geometry.described}: {reason}. Test it "
        f"with tools/labels verify {folder} --data DATA_DIR --teacher NAME; state it with --map-geometry "
        f"whole or {CENTRE_CROP}:RESIZE:SIZE"
    )
