"""Metrics of segmentation against loops over pixels, and windows against their definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from horovod_volo.core.batch import IGNORED
from horovod_volo.dense.mean_iou import count_pixels, iou_metrics, slide


def test_metrics_equal_those_of_loops_over_pixels() -> None:
    random = np.random.default_rng(0)
    classes, confusion = 6, torch.zeros(6, 6, dtype=torch.int64)
    pairs = []
    for size in ((5, 7), (16, 3), (1, 1)):
        truth = random.integers(0, 4, size, dtype=np.uint8)  # the classes 4 and 5 are nowhere in the masks
        predicted = np.where(random.random(size) < 0.6, truth, random.integers(0, 5, size))
        truth[random.random(size) < 0.2] = IGNORED
        confusion += count_pixels(torch.from_numpy(truth), torch.from_numpy(predicted), classes)
        pairs += list(zip(truth.ravel().tolist(), predicted.ravel().tolist(), strict=True))
    pairs = [pair for pair in pairs if pair[0] != IGNORED]
    ious, accuracies = [], []
    for label in range(classes):
        both = sum(pair == (label, label) for pair in pairs)
        either = sum(label in pair for pair in pairs)
        there = sum(pair[0] == label for pair in pairs)
        if either:
            ious.append(both / either)
        if there:
            accuracies.append(both / there)
    found = iou_metrics(confusion.numpy())
    assert len(ious) == 5
    assert found["miou"] == pytest.approx(100 * sum(ious) / len(ious), abs=1e-9)
    assert found["class_accuracy"] == pytest.approx(100 * sum(accuracies) / len(accuracies), abs=1e-9)
    right = sum(truth == predicted for truth, predicted in pairs)
    assert found["pixel_accuracy"] == pytest.approx(100 * right / len(pairs), abs=1e-9)


@pytest.mark.parametrize("batch", [1, 4, 50])
@pytest.mark.parametrize(
    ("size", "windows"), [((8, 8), 1), ((6, 5), 1), ((9, 8), 2), ((20, 13), 6), ((8, 40), 7)]
)
def test_every_pixel_has_the_mean_over_its_windows(size: tuple[int, int], windows: int, batch: int) -> None:
    """Each window's logits are its first pixel, which no other has; windows at the edge lie inside."""
    batches: list[int] = []

    def predict(images: Tensor) -> Tensor:
        batches.append(len(images))
        return images[:, :2, :1, :1].expand(-1, 2, *images.shape[2:])

    window, stride = 8, 6
    image = torch.arange(1.0, size[0] * size[1] + 1).view(1, 1, *size).expand(-1, 3, -1, -1)
    found = slide(predict, image, window, stride, batch)
    assert (sum(batches), max(batches)) == (windows, min(windows, batch))
    expected, counts = np.zeros(size), np.zeros(size)
    begins = [
        [max(0, min(step, side - window)) for step in range(0, max(side - window, 0) + stride, stride)]
        for side in size
    ]
    for top in dict.fromkeys(begins[0]):
        for left in dict.fromkeys(begins[1]):
            expected[top : top + window, left : left + window] += float(image[0, 0, top, left])
            counts[top : top + window, left : left + window] += 1
    assert found.shape == (1, 2, *size)
    assert np.allclose(found[0, 1].numpy(), expected / counts)
