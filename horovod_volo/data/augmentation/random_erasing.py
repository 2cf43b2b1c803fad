"""Random erasing: boxes of the normalised images are overwritten, usually with noise.

Boxes and noise are pure functions of (seed, epoch, sample index). The noise of a box is a slice of one long
sequence of normal numbers, starting at a random offset: it is the same on every device and costs a copy.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import copy_async
from horovod_volo.core.operators import kernel_of
from horovod_volo.core.rng import Purpose, philox, uniforms_of_samples

NOISE_LENGTH = 2**20
AREA = (0.02, 1 / 3)  # of all boxes of an image together, as a fraction of the image
MIN_ASPECT = 0.3  # height over width; the largest is its inverse
ATTEMPTS = 10


@dataclass(frozen=True, eq=False)
class Erasures:
    """The boxes to erase in a batch; a box of height 0 is unused."""

    boxes: NDArray[np.int64]  # (batch, count, 4) top, left, height, width in pixels
    noise: NDArray[np.int64]  # (batch, count) offset of the box's noise


def draw_erasures(
    seed: int, epoch: int, indices: NDArray[np.int64], settings: Data, image_size: int
) -> Erasures:
    """Draw the boxes to erase in each image."""
    max_count = settings.recount
    draws = uniforms_of_samples(
        2 + max_count * (2 * ATTEMPTS + 3), Purpose.RANDOM_ERASING, seed, epoch, indices
    )
    count = 1 + np.floor(draws[:, 1] * max_count).astype(np.int64)  # (batch,)
    count[draws[:, 0] >= settings.reprob] = 0
    each = draws[:, 2:].reshape(len(indices), max_count, -1)  # (batch, count, draws)
    area = (AREA[0] + (AREA[1] - AREA[0]) * each[..., :ATTEMPTS]) * image_size**2
    area = area / count.clip(min=1)[:, None, None]
    aspect = np.exp(math.log(MIN_ASPECT) * (1 - 2 * each[..., ATTEMPTS : 2 * ATTEMPTS]))
    shapes = np.rint(np.sqrt(np.stack([area * aspect, area / aspect], axis=-1))).astype(np.int64)
    fits = (shapes < image_size).all(axis=-1)  # (batch, count, attempts)
    first = fits.argmax(axis=2)[:, :, None, None]
    shape = np.take_along_axis(shapes, first, axis=2)[:, :, 0]  # (batch, count, 2)
    corner = np.floor(each[..., -3:-1] * (image_size - shape + 1)).astype(np.int64)
    used = (np.arange(max_count) < count[:, None]) & fits.any(axis=2)
    boxes = np.concatenate([corner, np.where(used[..., None], shape, 0)], axis=2)
    offsets = np.floor(each[..., -1] * NOISE_LENGTH).astype(np.int64)
    return Erasures(boxes, offsets)


class Eraser:
    """Erases boxes; holds the noise on the device."""

    def __init__(self, seed: int, settings: Data, image_size: int, device: torch.device) -> None:
        words = philox(Purpose.ERASING_NOISE, seed).random_raw((2, NOISE_LENGTH)) >> np.uint64(11)
        first, second = words / 2**53
        normal = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * math.pi * second)
        # The numbers are repeated at the end, so that the slice of any box may start at any offset.
        noise = np.resize(normal.astype(np.float32), NOISE_LENGTH + 3 * image_size**2)
        self._noise = torch.from_numpy(noise).to(device)
        self._mode = settings.remode

    def normalize(self, pixels: Tensor, mean: Tensor, std: Tensor, erasures: Erasures) -> Tensor:
        """Return uint8 images (batch, 3, image_size, image_size) normalised to float32, with erased boxes."""
        kernels = kernel_of("augmentation", pixels)
        if kernels is not None:
            packed = np.concatenate([erasures.boxes, erasures.noise[..., None]], axis=2)
            boxes = copy_async(packed, pixels.device)
            whole = pixels.contiguous()
            normalized: Tensor = kernels.normalize_images(whole, mean, std, boxes, self._noise, self._mode)
            return normalized
        images = pixels.float().sub_(mean).div_(std)
        self.erase_(images, erasures)
        return images

    def erase_(self, images: Tensor, erasures: Erasures) -> None:
        """Overwrite boxes of normalised images (batch, 3, image_size, image_size)."""
        for image, number in zip(*np.nonzero(erasures.boxes[..., 2]), strict=True):
            top, left, height, width = erasures.boxes[image, number].tolist()
            offset = int(erasures.noise[image, number])
            images[image, :, top : top + height, left : left + width] = self._content(offset, height, width)

    def _content(self, offset: int, height: int, width: int) -> Tensor:
        if self._mode == "pixel":
            return self._noise[offset : offset + 3 * height * width].view(3, height, width)
        if self._mode == "rand":
            return self._noise[offset : offset + 3].view(3, 1, 1)
        return torch.zeros((), device=self._noise.device)
