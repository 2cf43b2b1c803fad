"""The two ways to resize training crops, DALI's for the GPU and torch's for the CPU, give the same images."""

from __future__ import annotations

import io
from contextlib import closing
from functools import partial

import numpy as np
import torch
from coded_images import PLAIN, smooth
from PIL import Image

from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import Labels
from horovod_volo.data import train_transform
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.policy import draw_operations
from horovod_volo.data.augmentation.random_erasing import draw_erasures
from horovod_volo.data.image_decoder import build_train_pipeline, resizing_inputs
from horovod_volo.data.prefetcher import BatchPrefetcher, ImageThreadPool
from horovod_volo.data.train_transform import AugmentParams, PendingTrainBatch, TrainTransform

SIDE, IMAGES = 64, 12


def encoded(image: Image.Image) -> np.ndarray:
    data = io.BytesIO()
    image.save(data, "JPEG", quality=95)
    return np.frombuffer(data.getvalue(), dtype=np.uint8)


def batch_resized_by(*, dali: bool) -> torch.Tensor:
    settings = Data(**(PLAIN | {"train_interpolation": "random", "vflip": 0.5, "aa": "rand-m9-inc1"}))
    pictures = [smooth(90 + 7 * number, 120 - 3 * number, seed=number) for number in range(IMAGES)]
    sizes = np.array([(picture.height, picture.width) for picture in pictures])
    indices = np.arange(IMAGES)
    crop_flip = draw_crops(4, 0, indices, sizes, settings)
    assert 0 < crop_flip.bicubic.sum() < IMAGES
    boxes = crop_flip.stored(crop_flip.boxes, sizes)
    inputs = ([encoded(picture) for picture in pictures], list(boxes[:, :2]), list(boxes[:, 2:]))
    params = AugmentParams(
        crop_flip,
        draw_operations(4, 0, indices, settings),
        draw_erasures(4, 0, indices, settings, SIDE),
    )
    device = torch.device("cpu")
    with closing(ImageThreadPool(2, "transform")) as threads:
        transform = TrainTransform(
            settings, image_size=SIDE, seed=4, device=device, resized=dali, threads=threads
        )
        build = partial(
            build_train_pipeline, image_size=SIDE, batch=IMAGES, device=device, threads=1, resize=dali
        )
        prefetcher = BatchPrefetcher(build, device, 1, lambda index: None, transform)
        flips = (crop_flip.flip_horizontal, crop_flip.flip_vertical, crop_flip.bicubic)
        inputs += resizing_inputs(*flips) if dali else ()
        pending = PendingTrainBatch(indices, inputs, Labels(torch.zeros(IMAGES)), params, indices)
        ((_, images),) = prefetcher.batches([lambda: pending])
        prefetcher.close()
    return images


def test_dali_and_torch_give_the_same_images() -> None:
    ours, theirs = batch_resized_by(dali=False), batch_resized_by(dali=True)
    difference = (ours - theirs).abs().mean(dim=(1, 2, 3)) * 255 * 0.225
    # Operations that use a histogram or discard bits can enlarge differences of rounding in a few images.
    assert float(difference.median()) < 1
    assert float(difference.max()) < 6


def test_crops_are_the_same_transformed_together_and_one_by_one(monkeypatch) -> None:
    together = batch_resized_by(dali=False)
    monkeypatch.setattr(train_transform, "_SMALL_SIDE", 0)
    assert torch.equal(together, batch_resized_by(dali=False))
