"""One image's bytes in a form that DALI decodes as Pillow would, and its size.

What DALI takes otherwise than Pillow (CMYK, 16 bits, palettes, transparency, turned TIFF), or what
looks cut off, Pillow decodes here, and DALI gets the bare pixels. A file that passes is very likely
whole, but only decoding it tells for sure.
"""

from __future__ import annotations

import io
from functools import partial

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.data.bad_samples import BadSampleError, BadSampleTracker
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.thread_pool import ImageThreadPool

Encoded = NDArray[np.uint8]

_PLAIN_MODES = ("RGB", "L")
# What the last bytes of a whole file hold; some writers add a little after it.
_ENDINGS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
_TAIL_BYTES = 64


def read_image(catalog: Catalog, index: int) -> tuple[Encoded, tuple[int, int]]:
    """Return the encoded image and its stored height and width; raise BadSampleError if it is damaged."""
    encoded = catalog.read(index)
    try:
        with Image.open(io.BytesIO(encoded.data)) as image:  # reads the header only
            if not _is_plain(image, encoded):
                encoded = _bare_pixels(image)
            return encoded, (image.height, image.width)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise BadSampleError(f"{catalog.location(index)} is no whole image: {error}") from error


def _is_plain(image: Image.Image, encoded: Encoded) -> bool:
    ending = _ENDINGS.get(image.format or "")
    # An uneven number of bits a channel shows as a mode; transparency may hide behind a plain one.
    if ending is None or image.mode not in _PLAIN_MODES or "transparency" in image.info:
        return False
    return ending in encoded[-_TAIL_BYTES:].tobytes()


def _bare_pixels(image: Image.Image) -> Encoded:
    colours = image.convert("RGB")
    header = f"P6\n{image.width} {image.height}\n255\n".encode()
    return np.frombuffer(header + colours.tobytes(), dtype=np.uint8)


def read_present(
    indices: NDArray[np.int64], catalog: Catalog, damage: BadSampleTracker, readers: ImageThreadPool
) -> tuple[list[Encoded], NDArray[np.int64], NDArray[np.bool_]]:
    """Return a batch's images, their sizes (batch, 2) and which are absent; black stands for those."""

    def read(index: int) -> tuple[Encoded, tuple[int, int]] | None:
        try:
            return damage.usable(index, partial(read_image, catalog))
        except BadSampleError:
            return None

    found = readers.map(read, indices.tolist())
    shown = [(BLACK, (1, 1)) if sample is None else sample for sample in found]
    sizes = np.array([size for _, size in shown], dtype=np.int64)
    return [encoded for encoded, _ in shown], sizes, np.array([sample is None for sample in found])


BLACK: Encoded = np.frombuffer(b"P6\n1 1\n255\n\0\0\0", dtype=np.uint8)  # one pixel
