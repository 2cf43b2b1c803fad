"""Turns decoded training images into the network's input: resized, augmented, normalised, erased.

On the CPU crops are resized here, by torch's uint8 filters: they differ from Pillow's by one level at most
and take a fifth of the time of DALI's. On a GPU DALI has resized and flipped the crops already, unless
RandAugment works on whole images: these differ in size until they are cropped and resized here.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import Labels
from horovod_volo.data.augmentation.apply_ops import Parts, augment_, augment_part
from horovod_volo.data.augmentation.crop_flip import CropFlip
from horovod_volo.data.augmentation.policy import Operations
from horovod_volo.data.augmentation.random_erasing import Eraser, Erasures
from horovod_volo.data.image_decoder import IMAGENET_NORMALIZATION, Normalization, to_torch
from horovod_volo.data.prefetcher import ImageThreadPool, PendingBatch

# Crops of at most this side are transformed together, up to so many pixels: the calls in Python take longer
# than their pixels, and several threads would wait for Python's lock.
_SMALL_SIDE, _PIXELS_TOGETHER = 112, 2**20


@dataclass(frozen=True, eq=False)
class PendingTrainBatch(PendingBatch):
    """A training batch that has been read, but not decoded, and the augmentation drawn for it."""

    labels: Labels  # on the host
    drawn: NDArray[np.int64]  # (batch,) the images that were to be read; damaged ones are replaced
    crop_flip: CropFlip
    operations: Operations
    erasures: Erasures
    parts: Parts | None = None  # None: the operations work on the crops; else on the whole images


class TrainTransform:
    """The transform of the batches of one training loader."""

    def __init__(
        self,
        settings: Data,
        *,
        image_size: int,
        seed: int,
        device: torch.device,
        resized: bool,
        threads: ImageThreadPool,
        normalization: Normalization = IMAGENET_NORMALIZATION,
    ) -> None:
        """`resized` says whether DALI resizes and flips the crops."""
        self._image_size = image_size
        self._resized = resized
        self._threads = threads
        self._eraser = Eraser(seed, settings, image_size, device)
        self._mean, self._std = normalization.levels(device)

    def __call__(self, pending: PendingTrainBatch, decoded: Any) -> Tensor:
        """Return images (batch, 3, image_size, image_size) float32, normalised."""
        size, erasures = self._image_size, pending.erasures
        if self._resized:
            pixels = to_torch(decoded).permute(0, 3, 1, 2).contiguous()  # (batch, 3, size, size) uint8
            augment_(pixels, pending.operations)
            return self._eraser.normalize(pixels, self._mean, self._std, erasures)
        images = torch.empty(len(decoded), 3, size, size, device=self._mean.device)
        # Perhaps views of DALI's memory, valid until its next run; decoded.at() would copy.
        crops = [torch.utils.dlpack.from_dlpack(decoded[position]) for position in range(len(decoded))]
        of_crops = pending.parts is None
        transform = partial(
            self._transform_crops if of_crops else self._transform_whole, images, pending, crops
        )
        length = _PIXELS_TOGETHER // size**2 if of_crops and size <= _SMALL_SIDE else 1
        chunks = [slice(first, min(first + length, len(crops))) for first in range(0, len(crops), length)]
        if images.device.type == "cpu":
            self._threads.map(transform, chunks)
        else:  # other threads would launch kernels on other streams
            for rows in chunks:
                transform(rows)
        self._eraser.erase_(images, erasures)
        return images

    def _transform_crops(
        self, images: Tensor, pending: PendingTrainBatch, crops: list[Tensor], rows: slice
    ) -> None:
        """Resize, flip, augment and normalise the crops of some images."""
        pixels = torch.empty_like(images[rows], dtype=torch.uint8)
        for position, result in enumerate(pixels, rows.start):
            bicubic = bool(pending.crop_flip.bicubic[position])
            resized = resize_pixels(_planes(crops[position]), self._image_size, bicubic=bicubic)
            result.copy_(pending.crop_flip.flipped(resized, position)[0])
        augment_(pixels, pending.operations.of(rows))
        self._normalize(pixels, images[rows])

    def _transform_whole(
        self, images: Tensor, pending: PendingTrainBatch, parts: list[Tensor], rows: slice
    ) -> None:
        """Flip, augment, crop, resize and normalise one image, given the part that its crop depends on."""
        assert pending.parts is not None
        position = rows.start
        pixels = pending.crop_flip.flipped(_planes(parts[position]), position)
        pixels = augment_part(pixels, pending.operations.of(rows), pending.parts.of(rows))
        bicubic = bool(pending.crop_flip.bicubic[position])
        self._normalize(resize_pixels(pixels, self._image_size, bicubic=bicubic), images[rows])

    def _normalize(self, pixels: Tensor, result: Tensor) -> None:
        torch.sub(pixels, self._mean, out=result).div_(self._std)


def _planes(pixels: Tensor) -> Tensor:
    """Return a view (1, 3, height, width) of pixels (height, width, 3)."""
    return pixels.permute(2, 0, 1).unsqueeze(0)


def resize_pixels(pixels: Tensor, image_size: int, *, bicubic: bool) -> Tensor:
    """Resize uint8 images (batch, 3, height, width) with Pillow's filters."""
    resize = partial(
        torch.nn.functional.interpolate,
        size=(image_size, image_size),
        mode="bicubic" if bicubic else "bilinear",
        antialias=True,
    )
    if pixels.device.type == "cpu":
        return resize(pixels)
    # torch has these filters for uint8 on the CPU only.
    return resize(pixels.float()).round_().clamp_(0, 255).to(torch.uint8)
