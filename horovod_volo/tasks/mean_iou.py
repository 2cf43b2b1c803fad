"""Exact metrics of segmentation: every pixel of every image counts once, whatever the number of ranks.

Images are scaled as in training, without a random factor, and predicted whole or in overlapping windows;
logits are scaled back to the image's own size. Masks are never scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

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
from horovod_volo.data.scenes.scene_loader import Scene, SceneEvalLoader
from horovod_volo.data.scenes.scene_plan import keep_ratio
from horovod_volo.tasks.pictures import EvaluationPictures
from horovod_volo.tasks.task import Beat, Metrics

OnScene = Callable[[Scene, Tensor], object]  # given an image and its predicted classes
Predict = Callable[[Tensor], Tensor]  # normalised images -> logits of the same height and width


class ScenePredictor:
    """Predicts the classes of an image's pixels, from one or several sizes of it, mirrored or not."""

    def __init__(
        self,
        settings: Segmentation,
        window: int,
        normalization: Normalization,
        device: torch.device,
        *,
        batch: int = 1,
        scales: Sequence[float] = (1.0,),
        flip: bool = False,
    ) -> None:
        """Predict up to `batch` windows of an image at once.

        `scales` are factors of --scene-size; with `flip` each is predicted mirrored too.
        """
        self._batch = batch
        self._settings, self._window, self._device = settings, window, device
        self._scales, self._flips = scales, (False, True) if flip else (False,)
        self._mean = 255 * torch.tensor(normalization.mean, device=device).view(3, 1, 1)
        self._std = 255 * torch.tensor(normalization.std, device=device).view(3, 1, 1)

    def classes(self, network: nn.Module, pixels: Tensor) -> Tensor:
        """Return the classes (height, width) of an image (3, height, width) uint8."""
        levels = pixels.to(self._device).float()
        if len(self._scales) * len(self._flips) == 1:
            return self._logits(network, levels, self._scales[0]).argmax(dim=0)
        total: Tensor | float = 0.0
        for scale in self._scales:
            for flip in self._flips:
                logits = self._logits(network, levels.flip(2) if flip else levels, scale)
                total = total + (logits.flip(2) if flip else logits).softmax(dim=0)
        assert isinstance(total, Tensor)
        return total.argmax(dim=0)

    def _logits(self, network: nn.Module, levels: Tensor, scale: float) -> Tensor:
        """Return logits (classes, height, width) at the image's own size."""
        size = (levels.shape[1], levels.shape[2])
        longer, shorter = (int(side * scale) for side in self._settings.scene_size)
        images = ((resize(levels, keep_ratio(size, longer, shorter)) - self._mean) / self._std)[None]
        predict, stride = partial(logits_of, network), self._settings.test_stride
        if self._settings.test_mode == "slide":
            found = slide(predict, images, self._window, stride, self._batch)
        else:
            found = predict(images)
        return resize(found[0], size)


def logits_of(network: nn.Module, images: Tensor) -> Tensor:
    """Return logits of the images' height and width; the network pads them, and gives a quarter of that."""
    height, width = images.shape[2:]
    logits: Tensor = network(images).float()
    full = (4 * logits.shape[2], 4 * logits.shape[3])
    return F.interpolate(logits, size=full, mode="bilinear", align_corners=False)[..., :height, :width]


def slide(predict: Predict, image: Tensor, window: int, stride: int, batch: int = 1) -> Tensor:
    """Return the mean over windows of the logits of an image (1, 3, height, width).

    Windows are `stride` pixels apart; the last ones are moved back inside. Up to `batch` are predicted at
    once, all of one image: what is predicted does not depend on the images of a rank.
    """
    height, width = image.shape[2:]
    rows, columns = (_begins(side, window, stride) for side in (height, width))
    places = [(..., slice(top, top + window), slice(left, left + window)) for top in rows for left in columns]
    total: Tensor | None = None
    counts = image.new_zeros(1, 1, height, width)
    for first in range(0, len(places), batch):
        together = places[first : first + batch]
        logits = predict(torch.cat([image[place] for place in together]))
        if total is None:
            total = logits.new_zeros(1, logits.shape[1], height, width)
        for one, place in zip(logits, together, strict=True):
            total[place] += one
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


def ious(confusion: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the IoU of each class (classes,); NaN for one that is neither in the masks nor predicted."""
    right = confusion.diagonal()
    union = confusion.sum(axis=1) + confusion.sum(axis=0) - right
    return np.where(union > 0, right / np.maximum(union, 1), np.nan)


def iou_metrics(confusion: NDArray[np.int64]) -> Metrics:
    """Return the mean IoU, the accuracy of all pixels and its mean over classes, in per cent."""
    right, labelled = confusion.diagonal(), confusion.sum(axis=1)
    return {
        "miou": 100 * float(np.nanmean(ious(confusion))),
        "pixel_accuracy": 100 * float(right.sum() / labelled.sum()),
        "class_accuracy": 100 * float((right[labelled > 0] / labelled[labelled > 0]).mean()),
    }


class SceneCounts(NamedTuple):
    """The counts of all ranks."""

    confusion: NDArray[np.int64]  # (classes, classes) pixels of a class that were predicted as another
    images: int
    bad_samples: int  # damaged ones, of which no pixel is counted

    def metrics(self) -> Metrics:
        """Return the metrics and the numbers of images."""
        return iou_metrics(self.confusion) | {"images": self.images, "bad_samples": self.bad_samples}


def count_scenes(
    network: nn.Module,
    loader: SceneEvalLoader,
    scenes: SceneList,
    predictor: ScenePredictor,
    world: World,
    device: torch.device,
    on_scene: OnScene,
) -> SceneCounts:
    """Count the pixels of the images of all ranks. Collective: every rank calls this."""
    classes = len(scenes.classes)
    confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
    images = bad = 0
    for scene in loader:
        if scene is None:
            bad += 1
            continue
        predicted = predictor.classes(network, scene.pixels)
        confusion += count_pixels(scene.mask.to(device), predicted, classes)
        images += 1
        on_scene(scene, predicted)
    *counts, images_of_all, bad_of_all = world.sum_over_ranks(*confusion.flatten().tolist(), images, bad)
    if images_of_all + bad_of_all != len(scenes):
        raise RuntimeError(f"evaluation covered {images_of_all + bad_of_all:.0f} images of {len(scenes)}")
    total = np.array(counts).astype(np.int64).reshape(classes, classes)
    if not total.any():
        raise UserError(f"no image in {scenes.root} can be read, or no pixel has a label.")
    return SceneCounts(total, int(images_of_all), int(bad_of_all))


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
    pictures: EvaluationPictures,
) -> Metrics:
    """Return a network's metrics on the held-out images. Collective: every rank calls this."""

    def on_scene(scene: Scene, predicted: Tensor) -> None:
        if pictures.wants(scene.number):
            pictures.add_masks(scene, predicted)
        beat()

    with torch.inference_mode(), arithmetic:
        counts = count_scenes(network, loader, scenes, predictor, world, device, on_scene)
    return counts.metrics()
