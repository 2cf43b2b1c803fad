"""Images that cost what photographs cost: large and small mixed as in nature, saved as ImageNet's are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_CLASSES = 4
_LANDSCAPE, _PORTRAIT = (375, 500), (500, 375)  # height, width
_SHARE_OF_LANDSCAPES = 0.7
_QUALITY = 90  # about 110 KB, ImageNet's average


def write_photographs(folder: Path, images: int) -> None:
    """Write so many training images below a data folder; the same every time."""
    source = np.random.default_rng(0)
    for number in range(images):
        size = _LANDSCAPE if source.random() < _SHARE_OF_LANDSCAPES else _PORTRAIT
        path = folder / "train" / f"c{number % _CLASSES}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(_photograph(source, *size)).save(path, quality=_QUALITY)


def _photograph(source: np.random.Generator, height: int, width: int) -> NDArray[np.uint8]:
    """Draw noise whose waves are as strong as they are long; the channels have most of it in common."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1

    def waves(falling: float) -> NDArray[np.float64]:
        spectrum = source.normal(size=frequency.shape) + 1j * source.normal(size=frequency.shape)
        drawn = np.fft.irfft2(spectrum / frequency**falling, s=(height, width))
        return np.asarray(drawn / drawn.std())

    light = waves(1.0)
    channels = [118 + source.normal(0, 15) + 45 * (light + 0.5 * waves(1.2)) for _ in range(3)]
    return np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8)
