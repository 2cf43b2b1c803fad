"""Crops and flips are reproducible for each sample, and distributed as torchvision's RandomResizedCrop."""

import numpy as np
import pytest
import torch

import horovod_volo.models.timm_api  # noqa: F401  # torchvision imports only after it

# isort: split
from torchvision.transforms import RandomResizedCrop

from horovod_volo.config.data_settings import Data
from horovod_volo.data.augmentation.crop_flip import draw_crops

SAMPLES = 4000


def largest_gap(a, b):
    """Return the two-sample Kolmogorov-Smirnov statistic."""
    every = np.sort(np.concatenate([a, b]))
    below = [np.searchsorted(np.sort(sample), every, side="right") / len(sample) for sample in (a, b)]
    return np.abs(below[0] - below[1]).max()


def sizes_of(count, seed=0):
    return np.random.default_rng(seed).integers(20, 500, size=(count, 2))


def test_a_crop_does_not_depend_on_the_rest_of_its_batch():
    settings = Data(hflip=0.5, vflip=0.3)
    indices, sizes = np.arange(100, 164), sizes_of(64)
    whole = draw_crops(3, 5, indices, sizes, settings)
    for part in (slice(0, 1), slice(10, 17), slice(63, None, -1)):
        alone = draw_crops(3, 5, indices[part], sizes[part], settings)
        assert (alone.boxes == whole.boxes[part]).all()
        assert (alone.flip_horizontal == whole.flip_horizontal[part]).all()
        assert (alone.flip_vertical == whole.flip_vertical[part]).all()


def test_crops_differ_between_epochs_seeds_and_samples():
    sizes = np.full((64, 2), 300)
    crop_flip = draw_crops(3, 5, np.arange(64), sizes, Data())
    for other in (
        draw_crops(3, 6, np.arange(64), sizes, Data()),
        draw_crops(4, 5, np.arange(64), sizes, Data()),
        draw_crops(3, 5, np.arange(64, 128), sizes, Data()),
    ):
        assert (crop_flip.boxes == other.boxes).all(axis=1).mean() < 0.1
    assert len(np.unique(crop_flip.boxes, axis=0)) == 64


def test_boxes_lie_inside_their_images():
    sizes = np.concatenate([sizes_of(500), [[1, 1], [1, 300], [300, 1], [2, 3]]])
    boxes = draw_crops(0, 0, np.arange(504), sizes, Data()).boxes
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= sizes).all()


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_flips_have_the_set_probability_and_are_independent(probability):
    crop_flip = draw_crops(
        0, 0, np.arange(SAMPLES), np.full((SAMPLES, 2), 50), Data(hflip=probability, vflip=0.5)
    )
    deviation = np.sqrt(probability * (1 - probability) / SAMPLES)
    assert abs(crop_flip.flip_horizontal.mean() - probability) <= 4 * deviation
    both = (crop_flip.flip_horizontal & crop_flip.flip_vertical).mean()
    assert abs(both - probability / 2) < 4 * 0.5 / np.sqrt(SAMPLES)


@pytest.mark.parametrize(
    ("size", "scale"),
    [((375, 500), (0.08, 1.0)), ((64, 64), (0.08, 1.0)), ((333, 111), (0.3, 1.0)), ((40, 300), (0.08, 1.0))],
)
def test_boxes_are_distributed_as_torchvisions(size, scale):
    crop_flip = draw_crops(9, 0, np.arange(SAMPLES), np.full((SAMPLES, 2), size), Data(scale=scale))
    torch.manual_seed(0)
    image = torch.empty(3, *size)
    theirs = np.array(
        [RandomResizedCrop.get_params(image, list(scale), [3 / 4, 4 / 3]) for _ in range(SAMPLES)]
    )
    measures = {
        "top": lambda boxes: boxes[:, 0],
        "left": lambda boxes: boxes[:, 1],
        "height": lambda boxes: boxes[:, 2],
        "width": lambda boxes: boxes[:, 3],
        "area": lambda boxes: boxes[:, 2] * boxes[:, 3],
        "aspect": lambda boxes: boxes[:, 3] / boxes[:, 2],
        "centre row": lambda boxes: boxes[:, 0] + boxes[:, 2] / 2,
    }
    critical = 1.95 * np.sqrt(2 / SAMPLES)  # exceeded once in a thousand times by equal distributions
    for name, measure in measures.items():
        assert largest_gap(measure(crop_flip.boxes), measure(theirs)) < critical, name


@pytest.mark.parametrize(
    ("size", "box"),
    [((10, 400), (0, 193, 10, 13)), ((400, 10), (193, 0, 13, 10)), ((30, 30), (0, 0, 30, 30))],
)
def test_the_fallback_is_torchvisions_central_crop(size, box):
    settings = Data(scale=(4.0, 4.0))  # four times the image never fits
    crop_flip = draw_crops(0, 0, np.arange(3), np.full((3, 2), size), settings)
    theirs = RandomResizedCrop.get_params(torch.empty(3, *size), [4.0, 4.0], [3 / 4, 4 / 3])
    assert theirs == box
    assert (crop_flip.boxes == box).all()


def test_stored_boxes_are_the_crops_of_the_unflipped_image():
    sizes = sizes_of(200, seed=4)
    crop_flip = draw_crops(1, 1, np.arange(200), sizes, Data(hflip=0.5, vflip=0.5))
    for number, (size, stored) in enumerate(
        zip(sizes, crop_flip.stored(crop_flip.boxes, sizes), strict=True)
    ):
        pixels = np.arange(size[0] * size[1]).reshape(size)
        vertical = -1 if crop_flip.flip_vertical[number] else 1
        horizontal = -1 if crop_flip.flip_horizontal[number] else 1
        top, left, height, width = crop_flip.boxes[number]
        expected = pixels[::vertical, ::horizontal][top : top + height, left : left + width]
        top, left, height, width = stored
        cut = pixels[top : top + height, left : left + width][::vertical, ::horizontal]
        assert (cut == expected).all()
