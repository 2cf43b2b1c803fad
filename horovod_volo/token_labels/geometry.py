"""The part of its image that a label map covers: the whole image, or a centre crop.

The centre crop "centre-crop:RESIZE:SIZE" is timm's and torchvision's evaluation transform: resize the shorter
side to RESIZE pixels, then crop the central square of SIZE pixels, padded with black where SIZE is larger.
Invariant: their rounding is reproduced exactly.
"""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.center_crop import crop_corners, resized_to
from horovod_volo.core.errors import UserError

CENTRE_CROP = "centre-crop"


@dataclass(frozen=True)
class MapGeometry:
    """The part of each image that the label maps of a set cover; `resize` 0: the whole image."""

    resize: int = 0  # length of the shorter side after resizing, pixels
    size: int = 0  # side of the square cropped from the centre of the resized image, pixels

    @classmethod
    def parse(cls, text: str) -> "MapGeometry":
        """Parse the form that `str` returns."""
        if text == "whole":
            return cls()
        match = re.fullmatch(rf"{CENTRE_CROP}:([1-9]\d*):([1-9]\d*)", text)
        if match is None:
            raise UserError(
                f"{text!r} is not a geometry of label maps. Give --map-geometry whole, or {CENTRE_CROP}:"
                "RESIZE:SIZE with the length of the shorter side after resizing and the side of the central "
                f"square, in pixels, as in {PUBLISHED}."
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{CENTRE_CROP}:{self.resize}:{self.size}" if self.resize else "whole"

    @property
    def description(self) -> str:
        """Return the geometry as a phrase for messages."""
        return f"the image's centre crop ({self})" if self.resize else "the whole image"

    def covered(self, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the boxes (batch, 4) that maps cover: top, left, height, width as fractions of the image.

        `sizes` (batch, 2) are the heights and widths of the images. The box of a padded crop starts below 0
        and ends above 1.
        """
        if not self.resize:
            return np.tile([0.0, 0.0, 1.0, 1.0], (len(sizes), 1))
        resized = resized_to(sizes, self.resize)
        square = [crop_corners(resized, self.size), np.full_like(resized, self.size)]
        return np.concatenate(square, axis=1) / np.tile(resized, 2)


WHOLE = MapGeometry()
# The transform of the published generator, with the image size and --crop-pct 1.0 of its published command.
PUBLISHED = MapGeometry(576, 576)


def assumed_geometry(height: int, width: int) -> MapGeometry:
    """Return the geometry to assume for published maps of height x width cells that record none."""
    return PUBLISHED if height == width else WHOLE


def assumption_warning(folder: object, geometry: MapGeometry) -> str:
    """Return a warning that the geometry of the maps in `folder` is assumed, why, and how to state it."""
    reason = (
        "the published generator labels this crop, and the files do not record what they cover"
        if geometry.resize
        else "maps of a centre crop are square, and these are not"
    )
    return (
        f"a label map in {folder} is assumed to cover {geometry.description}: {reason}. State it with "
        f"--map-geometry whole or {CENTRE_CROP}:RESIZE:SIZE"
    )
