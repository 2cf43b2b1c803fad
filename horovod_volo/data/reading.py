"""The bytes of images and their sizes, read by several threads at a time."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.config.errors import UserError

ORIENTATION_TAG = 0x0112


def read_images(
    files: list[Path], readers: ThreadPoolExecutor
) -> tuple[list[NDArray[np.uint8]], NDArray[np.int64]]:
    """Return each file's bytes and the stored heights and widths (batch, 2)."""
    read = list(readers.map(_read_image, files))
    return [encoded for encoded, _ in read], np.array([size for _, size in read], dtype=np.int64)


def _read_image(file: Path) -> tuple[NDArray[np.uint8], tuple[int, int]]:
    try:
        encoded = file.read_bytes()
        with Image.open(io.BytesIO(encoded)) as image:  # reads the header only
            width, height = image.size
            turned = image.format == "TIFF" and image.getexif().get(ORIENTATION_TAG, 1) != 1
    except FileNotFoundError:
        raise UserError(f"{file} has gone since the start. Put it back, or start again.") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"cannot read {file}: {error}. Copy this image again, or remove it.") from error
    if turned:
        # PIL turns such files, and no other format, while decoding; DALI here turns none.
        raise UserError(f"{file} is a TIFF to be shown turned. Save it upright, or as JPEG or PNG.")
    return np.frombuffer(encoded, dtype=np.uint8), (height, width)
