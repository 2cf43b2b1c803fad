"""Random erasing: boxes of the finished, normalised image are overwritten, mostly with noise.

Boxes and noise are pure functions of (seed, epoch, sample index). The noise of an image is a stretch
of one long row of normal numbers, beginning at a drawn place: the same on every device, and no dearer
than a copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.schema import Data
from horovod_volo.core.rng import Purpose, philox, uniforms_of_samples

NOISE_LENGTH = 2**20
AREA = (0.02, 1 / 3)  # of all boxes of an image together, as a share of it
FLATTEST = 0.3
ATTEMPTS = 10


@dataclass(frozen=True, eq=False)
class Erasures:
    """What is erased of a batch; a box without height is none."""

    boxes: NDArray[np.int64]  # (batch, count, 4) top, left, height, width in pixels of the crop
    noise: NDArray[np.int64]  # (batch, count) where a box's noise begins in the row


def draw_erasures(seed: int, epoch: int, indices: NDArray[np.int64], settings: Data, side: int) -> Erasures:
    """Draw which boxes of each image are erased."""
    most = settings.recount
    draws = 2 + most * (2 * ATTEMPTS + 3)
    chance = uniforms_of_samples(draws, Purpose.RANDOM_ERASING, seed, epoch, indices)
    count = 1 + np.floor(chance[:, 1] * most).astype(np.int64)  # (batch,)
    count[chance[:, 0] >= settings.reprob] = 0
    each = chance[:, 2:].reshape(len(indices), most, -1)  # (batch, count, draws)
    area = (AREA[0] + (AREA[1] - AREA[0]) * each[..., :ATTEMPTS]) * side**2
    area = area / count.clip(min=1)[:, None, None]
    aspect = np.exp(math.log(FLATTEST) * (1 - 2 * each[..., ATTEMPTS : 2 * ATTEMPTS]))
    shapes = np.rint(np.sqrt(np.stack([area * aspect, area / aspect], axis=-1))).astype(np.int64)
    fits = (shapes < side).all(axis=-1)  # (batch, count, attempts)
    first = fits.argmax(axis=2)[:, :, None, None]
    shape = np.take_along_axis(shapes, first, axis=2)[:, :, 0]  # (batch, count, 2)
    corner = np.floor(each[..., -3:-1] * (side - shape + 1)).astype(np.int64)
    wanted = (np.arange(most) < count[:, None]) & fits.any(axis=2)
    boxes = np.concatenate([corner, np.where(wanted[..., None], shape, 0)], axis=2)
    start = np.floor(each[..., -1] * NOISE_LENGTH).astype(np.int64)
    return Erasures(boxes, start)


class Eraser:
    """Overwrites what was drawn; holds the row of noise on the device."""

    def __init__(self, seed: int, settings: Data, side: int, device: torch.device) -> None:
        words = philox(Purpose.ERASING_NOISE, seed).random_raw((2, NOISE_LENGTH)) >> np.uint64(11)
        first, second = words / 2**53
        normal = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * math.pi * second)
        # The row goes on with its own beginning, so that a stretch may start anywhere.
        row = np.concatenate([normal, normal[: 3 * side**2]]).astype(np.float32)
        self._row = torch.from_numpy(row).to(device)
        self._mode = settings.remode

    def erase_(self, images: Tensor, erasures: Erasures) -> None:
        """Overwrite boxes of normalised images (batch, 3, side, side)."""
        for image, number in zip(*np.nonzero(erasures.boxes[..., 2]), strict=True):
            top, left, height, width = erasures.boxes[image, number].tolist()
            start = int(erasures.noise[image, number])
            images[image, :, top : top + height, left : left + width] = self._content(start, height, width)

    def _content(self, start: int, height: int, width: int) -> Tensor:
        if self._mode == "pixel":
            return self._row[start : start + 3 * height * width].view(3, height, width)
        if self._mode == "rand":
            return self._row[start : start + 3].view(3, 1, 1)
        return torch.zeros((), device=self._row.device)
