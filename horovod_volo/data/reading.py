"""Reads images and brings them into a form that DALI decodes as Pillow would.

DALI and Pillow differ on CMYK, 16 bits a channel, palettes, transparency and rotated TIFF. Pillow decodes
these here, and images that look truncated, and DALI is given their pixels as PPM. An image that passes is
very likely complete, but only decoding shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.core.errors import BadSampleError
from horovod_volo.data.images.image_bytes import UNDECODABLE, decoded_rgb, jpeg_size, open_image, to_rgb

Encoded = NDArray[np.uint8]
# Maps stored heights and widths (batch, 2) to those before the crops.
Resize = Callable[[NDArray[np.int64]], NDArray[np.int64]]

_PLAIN_MODES = ("RGB", "L")
# Markers that end a complete file; some writers append a few bytes.
_END_MARKERS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
_TAIL_BYTES = 64
# The largest image of ImageNet has about 40 million. Decoding takes ten bytes of memory for each pixel.
_MOST_PIXELS = 100_000_000


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
    if image.mode not in _PLAIN_MODES or "transparency" in image.info:
        return False
    return _is_complete(image.format or "", encoded)


def _is_complete(form: str, encoded: Encoded) -> bool:
    end_marker = _END_MARKERS.get(form)
    return end_marker is not None and end_marker in encoded[-_TAIL_BYTES:].tobytes()


def to_ppm(image: Image.Image) -> Encoded:
    header = f"P6\n{image.width} {image.height}\n255\n".encode()
    return np.frombuffer(header + to_rgb(image).tobytes(), dtype=np.uint8)
