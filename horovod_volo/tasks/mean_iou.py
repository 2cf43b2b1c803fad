"""Exact metrics of segmentation: every pixel of every image counts once, whatever the number of ranks.

Images are scaled as in training, without a random factor, and predicted whole or in overlapping windows;
logits are scaled back to the image's own size. Masks are never scaled.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.config.dense_settings import Segmentation
from horovod_volo.core.batch import IGNORED
from horovod_volo.core.errors import UserError
from horovod_volo.data.pipeline import Normalization
from horovod_volo.data.scenes.scene_list import SceneList
from horovod_volo.data.scenes.scene_loader import SceneEvalLoader
from horovod_volo.data.scenes.scene_plan import keep_ratio
from horovod_volo.tasks.task import Beat, Metrics

Predict = Callable[[Tensor], Tensor]  # normalised images -> logits of the same height and width


class ScenePredictor:
    """Predicts the classes of an image's pixels."""

    def __init__(
        self, settings: Segmentation, window: int, normalization: Normalization, device: torch.device
    ) -> None:
        self._settings, self._window, self._device = settings, window, device
        self._mean = 255 * torch.tensor(normalization.mean, device=device).view(3, 1, 1)
        self._std = 255 * torch.tensor(normalization.std, device=device).view(3, 1, 1)

    def logits(self, network: nn.Module, pixels: Tensor) -> Tensor:
        """Return logits (classes, height, width) of an image (3, height, width) uint8."""
        size = (pixels.shape[1], pixels.shape[2])
        longer, shorter = (int(side) for side in self._settings.scene_size)
        scaled = keep_ratio(size, longer, shorter)
        levels = pixels.to(self._device).float()
        images = ((resize(levels, scaled) - self._mean) / self._std)[None]
        if self._settings.test_mode == "slide":
            found = slide(
                lambda part: _predict(network, part), images, self._window, self._settings.test_stride
            )
        else:
            found = _predict(network, images)
        return resize(found[0], size)


def _predict(network: nn.Module, images: Tensor) -> Tensor:
    """Return logits of the images' height and width; the network pads them, and gives a quarter of that."""
    height, width = images.shape[2:]
    logits: Tensor = network(images).float()
    full = (4 * logits.shape[2], 4 * logits.shape[3])
    return F.interpolate(logits, size=full, mode="bilinear", align_corners=False)[..., :height, :width]


def slide(predict: Predict, images: Tensor, window: int, stride: int) -> Tensor:
    """Return the mean over windows of the logits of images (batch, 3, height, width).

    Windows are `stride` pixels apart; the last ones are moved back inside.
    """
    height, width = images.shape[2:]
    rows, columns = (_begins(side, window, stride) for side in (height, width))
    total: Tensor | None = None
    counts = images.new_zeros(1, 1, height, width)
    for top in rows:
        for left in columns:
            place = (..., slice(top, top + window), slice(left, left + window))
            logits = predict(images[place])
            if total is None:
                total = logits.new_zeros(len(images), logits.shape[1], height, width)
            total[place] += logits
            counts[place] += 1
    assert total is not None
    return total / counts


def _begins(side: int, window: int, stride: int) -> list[int]:
    count = -(-max(side - window, 0) // stride) + 1
    return [max(0, min(number * stride, side - window)) for number in range(count)]


def resize(values: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize (channels, height, width) bilinearly."""
    return F.interpolate(values[None], size=size, mode="bilinear", align_corners=False)[0]


def count_pixels(truth: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Return how many pixels of each class were predicted as which (classes, classes) int64."""
    labelled = truth != IGNORED
    # Ignored pixels are counted in one more row, which is dropped: selecting them would wait for the device.
    rows = torch.where(labelled, truth, classes).long()
    pairs = (rows * classes + predicted.long()).flatten()
    return torch.bincount(pairs, minlength=(classes + 1) * classes)[: classes * classes].view(
        classes, classes
    )


def iou_metrics(confusion: NDArray[np.int64]) -> Metrics:
    """Return the mean IoU, the accuracy of all pixels and its mean over classes, in per cent.

    A class that is neither in the masks nor predicted is left out.
    """
    right, labelled, predicted = confusion.diagonal(), confusion.sum(axis=1), confusion.sum(axis=0)
    union = labelled + predicted - right
    return {
        "miou": 100 * float((right[union > 0] / union[union > 0]).mean()),
        "pixel_accuracy": 100 * float(right.sum() / labelled.sum()),
        "class_accuracy": 100 * float((right[labelled > 0] / labelled[labelled > 0]).mean()),
    }


def measure_iou(
    network: nn.Module,
    beat: Beat,
    *,
    loader: SceneEvalLoader,
    scenes: SceneList,
    predictor: ScenePredictor,
    world: World,
    device: torch.device,
    arithmetic: torch.autocast,
) -> Metrics:
    """Return a network's metrics on the held-out images. Collective: every rank calls this."""
    classes = len(scenes.classes)
    confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    images = bad = 0
    with torch.inference_mode(), arithmetic:
        for scene in loader:
            if scene is None:
                bad += 1
                continue
            predicted = predictor.logits(network, scene.pixels).argmax(dim=0)
            confusion += count_pixels(scene.mask.to(device), predicted, classes)
            images += 1
            beat()
    *counts, images_of_all, bad_of_all = world.sum_over_ranks(*confusion.flatten().tolist(), images, bad)
    if images_of_all + bad_of_all != len(scenes):
        raise RuntimeError(f"evaluation covered {images_of_all + bad_of_all:.0f} images of {len(scenes)}")
    total = np.array(counts).astype(np.int64).reshape(classes, classes)
    if not total.any():
        raise UserError(f"no image in {scenes.root} can be read, or no pixel has a label.")
    return iou_metrics(total) | {"images": int(images_of_all), "bad_samples": int(bad_of_all)}
