"""Pictures for TensorBoard and for pages: their encoding, and the colours and texts that they share."""

import base64
import io
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFont

from horovod_volo.core.batch import IGNORED
from horovod_volo.monitor.logger import Picture

Color = tuple[int, int, int]

# Told apart as tints of dark and of light pixels, also with most colour blindness. Later classes are grey.
PALETTE: tuple[Color, ...] = (
    (0, 80, 220),
    (215, 60, 0),
    (0, 160, 110),
    (240, 130, 190),
    (245, 220, 40),
    (70, 200, 245),
    (110, 30, 130),
    (120, 80, 30),
)
GREY: Color = (120, 120, 120)
TEXT: Color = (25, 25, 25)
SECONDARY_TEXT: Color = (105, 105, 105)
BACKGROUND: Color = (255, 255, 255)

_GOLDEN_RATIO = 0.618  # of the circle of hues, between neighbouring classes


def encoded_picture(image: Image.Image, compress_level: int = 6) -> Picture:
    """Return an image as PNG."""
    file = io.BytesIO()
    image.save(file, format="PNG", compress_level=compress_level)
    return Picture(file.getvalue(), image.width, image.height)


def encoded_with_palette(image: Image.Image) -> Picture:
    """Return an image as PNG with 256 colours.

    A palette takes a third of the bytes, and TensorBoard's checksum of events is slow. More compression saves
    a tenth of them, and takes longer than their checksum.
    """
    return encoded_picture(image.quantize(256, Image.Quantize.FASTOCTREE), compress_level=2)


def inlined_jpeg(image: Image.Image) -> str:
    """Return an image as the address of a picture that is inside its page."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def class_colors() -> NDArray[np.uint8]:
    """Return a colour for each class (256, 3), of which neighbours have different hues; IGNORED is black."""
    hues = np.arange(256) * _GOLDEN_RATIO % 1
    channels = [np.abs((6 * hues + offset) % 6 - 3) - 1 for offset in (0, 4, 2)]
    levels = 55 + 200 * np.clip(np.stack(channels, axis=1), 0, 1)
    levels[IGNORED] = 0
    colors: NDArray[np.uint8] = levels.astype(np.uint8)
    return colors


def palette_colors(classes: NDArray[np.integer[Any]]) -> dict[int, Color]:
    """Return a colour for each class in an array, the most frequent first; those beyond PALETTE are grey."""
    ordered = [int(kind) for kind, _ in Counter(classes.ravel().tolist()).most_common()]
    return {kind: PALETTE[number] if number < len(PALETTE) else GREY for number, kind in enumerate(ordered)}


@cache
def load_font(size: int) -> ImageFont.FreeTypeFont:
    """Return the font that is built into Pillow."""
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("this build of Pillow has no FreeType, which drawing text of a given size needs")
    return font
