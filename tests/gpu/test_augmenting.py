"""Augmenting a batch on a device, grouped by operation, equals augmenting image by image on the CPU."""

from __future__ import annotations

import numpy as np
import torch

from horovod_volo.config.schema import Data
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.apply_ops import augment_
from horovod_volo.data.augmentation.crop_flip import draw_crops
from horovod_volo.data.augmentation.rand_augment import draw_operations
from horovod_volo.data.augmentation.random_erasing import Eraser, draw_erasures
from horovod_volo.data.augmentation.whole_image import augment_part, parts_needed

SIDE, IMAGES = 64, 256
SETTINGS = Data(aa="rand-m9-n3-p0.7-mstd0.5-inc1", reprob=0.5)


def test_operations_equal_the_cpus(device: torch.device) -> None:
    waves = torch.rand(IMAGES, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    images = torch.nn.functional.interpolate(255 * waves, (SIDE, SIDE), mode="bilinear").to(torch.uint8)
    operations = draw_operations(1, 0, np.arange(IMAGES), SETTINGS)
    assert set(np.unique(operations.kinds)) == {ops.NONE, *ops.OPERATIONS}
    batched = images.clone().to(device)
    augment_(batched, operations)
    alone = images.clone()
    for place in range(IMAGES):
        augment_(alone[place : place + 1], operations.of(place))
    difference = (batched.cpu().int() - alone.int()).abs().float()
    assert difference.mean() <= (0.0 if device.type == "cpu" else 0.5)
    assert (alone.int() - images.int()).abs().float().mean() > 20


def test_operations_before_the_crop_equal_the_cpus(device: torch.device) -> None:
    waves = torch.rand(1, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    image = torch.nn.functional.interpolate(255 * waves, (90, 120), mode="bilinear").to(torch.uint8)
    indices, sizes = np.arange(IMAGES), np.tile(np.array([90, 120]), (IMAGES, 1))
    operations = draw_operations(1, 0, indices, SETTINGS)
    parts = parts_needed(draw_crops(1, 0, indices, sizes, SETTINGS).boxes, sizes, operations)
    differences = []
    for place, (top, left, height, width) in enumerate(parts.decoded.tolist()):
        part = image[..., top : top + height, left : left + width]
        alone = operations.of(place), parts.of(place)
        crop, expected = augment_part(part.to(device), *alone), augment_part(part, *alone)
        differences.append(float((crop.cpu().int() - expected.int()).abs().float().mean()))
    assert np.mean(differences) <= (0.0 if device.type == "cpu" else 0.5)


def test_erased_boxes_equal_the_cpus(device: torch.device) -> None:
    drawn = draw_erasures(1, 0, np.arange(IMAGES), SETTINGS, SIDE)
    expected = torch.zeros(IMAGES, 3, SIDE, SIDE)
    Eraser(1, SETTINGS, SIDE, torch.device("cpu")).erase_(expected, drawn)
    found = torch.zeros(IMAGES, 3, SIDE, SIDE, device=device)
    Eraser(1, SETTINGS, SIDE, device).erase_(found, drawn)
    assert expected.any()
    assert torch.equal(found.cpu(), expected)
