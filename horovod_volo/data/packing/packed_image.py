"""One image on its way into a shard: whole, and made smaller where that is asked for."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

from PIL import Image

from horovod_volo.data.bad_samples import BadSampleError
from horovod_volo.data.images.image_bytes import IMAGE_ENDINGS, START_BYTES, ending_of

# What decoders raise for damaged headers and pixels.
_DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)
_DRAFT_SCALE = 8  # a JPEG decoded this many times smaller is read to its end all the same


def packed_image(name: str, encoded: bytes, *, shorter_side: int, quality: int) -> tuple[str, bytes]:
    """Return the name and bytes to pack; raise BadSampleError where an image cannot be decoded.

    With `shorter_side`, an image whose shorter side is larger is shrunk to it and saved as JPEG. All others
    keep their bytes.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images and odd metadata decode all the same
            with Image.open(io.BytesIO(encoded)) as image:
                if shorter_side and min(image.size) > shorter_side:
                    kept = name.lower().endswith((".jpg", ".jpeg"))
                    return name if kept else f"{name}.jpg", _shrunk(image, shorter_side, quality)
                image.draft(None, (_drafted(image.width), _drafted(image.height)))
                image.load()
    except _DECODING_ERRORS as error:
        raise BadSampleError(f"cannot be decoded: {error}") from error
    if name.lower().endswith(IMAGE_ENDINGS):
        return name, encoded
    return f"{name}{ending_of(encoded[:START_BYTES]) or IMAGE_ENDINGS[0]}", encoded


def _drafted(side: int) -> int:
    return max(1, side // _DRAFT_SCALE)


def _shrunk(image: Image.Image, shorter_side: int, quality: int) -> bytes:
    share = shorter_side / min(image.size)
    size = (max(shorter_side, round(image.width * share)), max(shorter_side, round(image.height * share)))
    stream = io.BytesIO()
    image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(stream, "JPEG", quality=quality)
    return stream.getvalue()
