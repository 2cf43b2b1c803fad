"""Numbers that tell a kernel what to do, shared with its caller, which does not import Triton."""

from __future__ import annotations

from enum import IntEnum, auto


class PixelOp(IntEnum):
    """What the kernels do to an image."""

    COPY = 0
    INVERT = auto()
    POSTERIZE = auto()  # argument: the mask of the bits that stay
    SOLARIZE = auto()
    SOLARIZE_ADD = auto()
    BRIGHTNESS = auto()
    COLOR = auto()
    SHARPNESS = auto()
    AUTO_CONTRAST = auto()  # from here to CONTRAST: by a table of the image's statistics
    EQUALIZE = auto()
    CONTRAST = auto()
    ALONG_X = auto()  # matrix: pixels per row, pixels
    ALONG_Y = auto()
    ROTATE = auto()  # matrix: from pixels to coordinates from -1 to 1, the last column less 1
