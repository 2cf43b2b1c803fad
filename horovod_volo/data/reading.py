"""Reads images: recognises them, opens them with Pillow, and brings them into a form that DALI decodes alike.

DALI and Pillow differ on CMYK, 16 bits a channel, palettes, transparency and rotated TIFF. Pillow decodes
these here, and images that look truncated, and DALI is given their pixels as PPM. An image that passes is
very likely complete, but only decoding shows it.

Invariant: no other module lets Pillow open a file. Pillow knows formats that start programs or are hardly
tested, and chooses them by content, whatever a file is called.
"""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError, features

from horovod_volo.core.errors import BadSampleError

Encoded = NDArray[np.uint8]
# Maps stored heights and widths (batch, 2) to those before the crops.
Resize = Callable[[NDArray[np.int64]], NDArray[np.int64]]

_PLAIN_MODES = ("RGB", "L")
# Markers that end a complete file; some writers append a few bytes.
_END_MARKERS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
_TAIL_BYTES = 64
# The largest image of ImageNet has about 40 million. Decoding takes ten bytes of memory for each pixel.
_MOST_PIXELS = 100_000_000

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
_AVIF = ("AVIF",) if "avif" in features.modules and features.check("avif") else ()  # from Pillow 11.3 on
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", *_AVIF)  # `to_ppm` writes PPM
# What Pillow raises for an image that it cannot open or decode.
UNDECODABLE = (
    *(OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError),
    *(struct.error, zlib.error, Image.DecompressionBombError),
)

_ENDING_OF_START = {
    b"\xff\xd8\xff": ".jpg",
    b"\x89PNG\r\n\x1a\n": ".png",
    b"BM": ".bmp",
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), ".tif"),  # the last two of BigTIFF
    b"GIF8": ".gif",  # decoders accept it and PPM under any name
    **dict.fromkeys([b"P%d" % kind for kind in range(1, 7)], ".ppm"),
}
START_BYTES = 12  # enough for `ending_of`
# Segments of a JPEG file, by the byte that names their kind. Frames: baseline, extended, progressive.
_FRAMES = (0xC0, 0xC1, 0xC2)
_BEFORE_FRAME = (0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0))  # tables, comments, and what applications add
_SEVERAL_IMAGES = b"MPF\0"  # how such an addition begins where the file has several images
_BITS_PER_SAMPLE = 258  # a tag of TIFF


class ImageFiles(Protocol):
    """A list of encoded images."""

    def read(self, index: int) -> Encoded:
        """Return an encoded image; raise BadSampleError if it cannot be read."""

    def location(self, index: int) -> str:
        """Return where an image is, for messages."""


def read_image(catalog: ImageFiles, index: int) -> tuple[Encoded, tuple[int, int]]:
    """Return the encoded image and its stored height and width; raise BadSampleError if it is damaged."""
    encoded = catalog.read(index)
    try:
        size = jpeg_size(encoded.data)
        if size is not None and size[0] * size[1] <= _MOST_PIXELS and _is_complete("JPEG", encoded):
            return encoded, size
        with open_image(encoded.data) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise Image.DecompressionBombError
            if not _is_plain(image, encoded):
                encoded = to_ppm(image)
            return encoded, (image.height, image.width)
    except Image.DecompressionBombError:
        raise _too_large(catalog, index, "; resize it to use it") from None
    except UNDECODABLE as error:
        raise BadSampleError(f"{catalog.location(index)} cannot be decoded: {error}") from error


def decode_rgb(images: ImageFiles, index: int) -> NDArray[np.uint8]:
    """Return the pixels of an image (height, width, 3); raise BadSampleError if it is damaged."""
    encoded, _ = read_image(images, index)
    try:
        return np.array(decoded_rgb(encoded.data))
    except UNDECODABLE as error:
        raise BadSampleError(f"{images.location(index)} cannot be decoded: {error}") from error


def thumbnail(images: ImageFiles, index: int, size: tuple[int, int]) -> Image.Image:
    """Return an image that fits into `size`, where small ones are enlarged; raise BadSampleError."""
    image = Image.fromarray(decode_rgb(images, index))
    factor = min(size[0] / image.width, size[1] / image.height)
    fitted = max(1, round(factor * image.width)), max(1, round(factor * image.height))
    return image.resize(fitted, Image.Resampling.LANCZOS)


def resized_shape(images: ImageFiles, index: int, size: tuple[int, int], resize: Resize) -> NDArray[np.int64]:
    """Return the height and width of an image before the crops; raise BadSampleError if it is too large."""
    shape: NDArray[np.int64] = resize(np.array([size], dtype=np.int64))[0]
    if shape.prod() > _MOST_PIXELS:
        height, width = shape.tolist()
        raise _too_large(images, index, f" when it is resized to {width} x {height}; crop it to use it")
    return shape


def _too_large(images: ImageFiles, index: int, remedy: str) -> BadSampleError:
    millions = _MOST_PIXELS // 1_000_000
    return BadSampleError(f"{images.location(index)} has more than {millions} million pixels{remedy}")


def _is_plain(image: Image.Image, encoded: Encoded) -> bool:
    # 16 bits a channel have modes of their own; an RGB or L image may still have a transparent color.
    is_plain = image.mode in _PLAIN_MODES and "transparency" not in image.info
    return is_plain and _is_complete(image.format or "", encoded)


def _is_complete(form: str, encoded: Encoded) -> bool:
    end_marker = _END_MARKERS.get(form)
    return end_marker is not None and end_marker in encoded[-_TAIL_BYTES:].tobytes()


def to_ppm(image: Image.Image) -> Encoded:
    header = f"P6\n{image.width} {image.height}\n255\n".encode()
    return np.frombuffer(header + to_rgb(image).tobytes(), dtype=np.uint8)


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
