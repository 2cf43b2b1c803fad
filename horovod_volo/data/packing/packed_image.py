"""Validate an image before it is packed, and shrink it if requested."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

from PIL import Image

from horovod_volo.data.bad_samples import BadSampleError
from horovod_volo.data.images.image_bytes import IMAGE_ENDINGS, START_BYTES, ending_of

# Pillow's decoders raise these for damaged headers and pixels.
_DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
_DRAFT_SCALE = 8  # decoding a JPEG at 1/8 scale is fast and still reads the whole file


def packed_image(name: str, encoded: bytes, *, shorter_side: int, quality: int) -> tuple[str, bytes]:
    """Return the name and bytes to pack; raise BadSampleError if the image cannot be decoded.

    With `shorter_side` larger images are resized to that length of the shorter side and encoded as JPEG. All
    other images are packed unchanged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images and invalid metadata decode nevertheless
            with Image.open(io.BytesIO(encoded)) as image:
                if shorter_side and min(image.size) > shorter_side:
                    is_jpeg = name.lower().endswith((".jpg", ".jpeg"))
                    return name if is_jpeg else f"{name}.jpg", _shrink(image, shorter_side, quality)
                image.draft(None, (_draft_length(image.width), _draft_length(image.height)))
                image.load()
    except _DECODING_ERRORS as error:
        raise BadSampleError(f"cannot be decoded: {error}") from error
    if name.lower().endswith(IMAGE_ENDINGS):
        return name, encoded
    return f"{name}{ending_of(encoded[:START_BYTES]) or IMAGE_ENDINGS[0]}", encoded


def _draft_length(length: int) -> int:
    return max(1, length // _DRAFT_SCALE)


def _shrink(image: Image.Image, shorter_side: int, quality: int) -> bytes:
    scale = shorter_side / min(image.size)
    size = (max(shorter_side, round(image.width * scale)), max(shorter_side, round(image.height * scale)))
    stream = io.BytesIO()
    image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(stream, "JPEG", quality=quality)
    return stream.getvalue()
