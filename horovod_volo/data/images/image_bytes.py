"""Recognises image files by name or by their first bytes, and opens them with Pillow.

Invariant: no other module lets Pillow open a file. Pillow knows formats that start programs or are hardly
tested, and chooses them by content, whatever a file is called.
"""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image, UnidentifiedImageError, features

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
_AVIF = ("AVIF",) if "avif" in features.modules and features.check("avif") else ()  # from Pillow 11.3 on
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", *_AVIF)  # `reading.to_ppm` writes PPM
# What Pillow raises for an image that it cannot open or decode.
UNDECODABLE = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)

_ENDING_OF_START = {
    b"\xff\xd8\xff": ".jpg",
    b"\x89PNG\r\n\x1a\n": ".png",
    b"BM": ".bmp",
    b"II*\0": ".tif",
    b"MM\0*": ".tif",
    b"GIF8": ".gif",  # decoders accept it under any name
}
START_BYTES = 12  # enough for `ending_of`
# Segments of a JPEG file, by the byte that names their kind. Frames: baseline, extended, progressive.
_FRAMES = (0xC0, 0xC1, 0xC2)
_BEFORE_FRAME = (0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0))  # tables, comments, and what applications add
_SEVERAL_IMAGES = b"MPF\0"  # how such an addition begins where the file has several images
_BITS_PER_SAMPLE = 258  # a tag of TIFF


def ending_of(start: bytes) -> str:
    """Return the usual file name extension for an image's first bytes; empty if they are not an image."""
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return ".webp"
    if start[4:8] == b"ftyp" and start[8:12] in (b"avif", b"avis"):
        return ".avif"
    return next((ending for bytes_, ending in _ENDING_OF_START.items() if start.startswith(bytes_)), "")


def jpeg_size(encoded: memoryview) -> tuple[int, int] | None:
    """Return height and width of an ordinary JPEG image, gray or RGB; None: ask Pillow, which is slower."""
    position = 2 if bytes(encoded[:2]) == b"\xff\xd8" else len(encoded)
    while position + 10 <= len(encoded):
        mark, kind, length = struct.unpack_from(">BBH", encoded, position)
        position += 4
        if mark == 0xFF and kind in _FRAMES:
            bits, height, width, channels = struct.unpack_from(">BHHB", encoded, position)
            return (height, width) if bits == 8 and channels in (1, 3) and height * width else None
        if mark != 0xFF or kind not in _BEFORE_FRAME or encoded[position : position + 4] == _SEVERAL_IMAGES:
            return None
        position += length - 2
    return None


def open_image(encoded: bytes | memoryview) -> Image.Image:
    """Read the header of an image of one of FORMATS; raise one of UNDECODABLE if that is impossible."""
    try:
        return Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError:
        raise UnidentifiedImageError(f"it is not an image of a known format ({', '.join(FORMATS)})") from None


def decoded_rgb(encoded: bytes | memoryview) -> Image.Image:
    """Return a decoded image; raise one of UNDECODABLE if it is damaged."""
    with open_image(encoded) as image:
        return to_rgb(image)


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image with 8 bits a channel; raise one of UNDECODABLE if it is damaged.

    Gray levels of 16 bits are scaled, as DALI does. Pillow itself makes all of them above 255 white.
    """
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):
        (bits,) = getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (16,))
        levels = np.asarray(image) * (255 / (2**bits - 1))
        return Image.fromarray(np.rint(levels).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its gray levels (Pillow's mode {image.mode}) have no known maximum; convert the image to 8 or "
            "16 bits"
        )
    return image.convert("RGB")
