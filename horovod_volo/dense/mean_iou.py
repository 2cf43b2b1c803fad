"""Exact metrics of segmentation: every pixel of every image counts once, whatever the number of ranks.

Images are scaled as in training, without a random factor, and predicted whole or in overlapping windows;
logits are scaled back to the image's own size. Masks are never scaled.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from math import isnan
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from horovod_volo.core.batch import IGNORED
from horovod_volo.core.errors import UserError
from horovod_volo.data.bad_samples import BadSampleTracker
from horovod_volo.data.reading import decode_rgb
from horovod_volo.dense.dense_batches import RankContext
from horovod_volo.dense.pictures import EvaluationPictures, write_prediction
from horovod_volo.dense.scene_list import SceneList
from horovod_volo.dense.scene_loader import keep_ratio
from horovod_volo.dense.task import Evaluation, Measured
from horovod_volo.engine.task import Beat, Metrics


class Scene(NamedTuple):
    """One image of the evaluation, at its own size."""

    number: int  # in the list
    pixels: Tensor  # (3, height, width) uint8, on the host
    mask: Tensor  # (height, width) uint8, on the host


class SceneEvalLoader:
    """This rank's images of the evaluation, one by one; over all ranks, each is there once."""

    damaged = 0  # images of the last iteration that could not be used

    def __init__(self, scenes: SceneList, context: RankContext) -> None:
        settings = context.config.data
        self.bad_samples = BadSampleTracker(settings.bad_samples, settings.bad_samples_limit)
        self._scenes, self._indices = scenes, range(context.world.rank, len(scenes), context.world.size)
        self._ahead = settings.prefetch + context.threads
        self._threads = ThreadPoolExecutor(context.threads, "scene-reader")

    def __iter__(self) -> Iterator[Scene]:
        """Yield the images that can be used, in the list's order, and count the others."""
        self.damaged = 0
        read = partial(self.bad_samples.read_or_skip, read=self._read)
        reads = (self._threads.submit(read, index) for index in self._indices)
        waiting = deque(islice(reads, self._ahead + 1))
        while waiting:
            scene = waiting.popleft().result()
            waiting.extend(islice(reads, 1))
            if scene is None:
                self.damaged += 1
            else:
                yield scene

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def _read(self, index: int) -> Scene:
        pixels = decode_rgb(self._scenes, index)
        mask = self._scenes.read_mask(index, (pixels.shape[0], pixels.shape[1]))
        return Scene(index, torch.from_numpy(pixels).permute(2, 0, 1), torch.from_numpy(mask))


class SceneEvaluation(Evaluation):
    """Predicts the classes of an image's pixels, from one or several sizes of it, mirrored or not."""

    def __init__(self, scenes: SceneList, context: RankContext) -> None:
        self._context, self._scenes, data = context, scenes, context.config.data
        self._settings, self._window = context.config.segmentation, context.config.model.img_size
        self._batch = data.eval_batch_size or data.batch_size  # windows that are predicted together
        self._mean, self._std = context.normalization.levels(context.device)
        self._loader = SceneEvalLoader(scenes, context)
        self.bad_samples, self.folder = self._loader.bad_samples, scenes.root

    @property
    def options(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Return how images are predicted, for the result."""
        return {"test_mode": self._settings.test_mode, **self.views._asdict()}

    def measure(self, network: nn.Module, beat: Beat, pictures: EvaluationPictures | None = None) -> Measured:
        """Count the pixels of the images of all ranks. Collective: every rank calls this."""
        scenes, device, classes = self._scenes, self._context.device, len(self._scenes.classes)
        confusion = torch.zeros(classes, classes, dtype=torch.int64, device=device)
        images = 0
        with torch.inference_mode(), self._context.autocast:
            for scene in self._loader:
                predicted = self._predict(network, scene)
                confusion += count_pixels(scene.mask.to(device), predicted, classes)
                images += 1
                if pictures and pictures.wants(scene.number):
                    pictures.add_masks(*scene, predicted)
                if self.predictions:
                    write_prediction(self.predictions, scenes, scene.number, predicted)
                beat(1)
        own = (*confusion.flatten().tolist(), images, self._loader.damaged)
        *counts, images_of_all, bad_of_all = map(int, self._context.world.sum_over_ranks(*own))
        if images_of_all + bad_of_all != len(scenes):
            raise RuntimeError(f"evaluation covered {images_of_all + bad_of_all} images of {len(scenes)}")
        total = np.array(counts, dtype=np.int64).reshape(classes, classes)
        if not total.any():
            raise UserError(f"no image in {scenes.root} can be read, or no pixel has a label.")
        metrics = iou_metrics(total) | {"images": images_of_all, "bad_samples": bad_of_all}
        of_classes = zip(scenes.classes, (100 * ious(total)).tolist(), strict=True)
        return Measured(metrics, {name: iou for name, iou in of_classes if not isnan(iou)})

    def rows(self, metrics: Metrics) -> list[tuple[str, str]]:
        return [
            ("mean IoU", f"{metrics['miou']:.3f} %"),
            ("pixels", f"{metrics['pixel_accuracy']:.3f} % right"),
            ("classes", f"{metrics['class_accuracy']:.3f} % right on average"),
        ]

    def _predict(self, network: nn.Module, scene: Scene) -> Tensor:
        """Return the classes of an image's pixels (height, width)."""
        levels = scene.pixels.to(self._context.device).float()
        height, width = scene.mask.shape
        found = list[Tensor]()
        for scale in self.views.scales:
            for flip in (False, True) if self.views.flip else (False,):
                image = self._scaled(levels.flip(2) if flip else levels, scale)
                if self._settings.test_mode == "slide":
                    logits = slide(network, image, self._window, self._settings.test_stride, self._batch)
                else:
                    logits = network(image)
                full = resize(logits[0], (height, width))
                found.append(full.flip(2) if flip else full)
        if len(found) == 1:
            return found[0].argmax(dim=0)
        probabilities = (logits.softmax(dim=0) for logits in found)
        return sum(probabilities, torch.zeros_like(found[0])).argmax(dim=0)

    def _scaled(self, levels: Tensor, scale: float) -> Tensor:
        """Return a normalised image (1, 3, height, width) of another size."""
        longer, shorter = (int(side * scale) for side in self._settings.scene_size)
        size = keep_ratio((levels.shape[1], levels.shape[2]), longer, shorter)
        return ((resize(levels, size) - self._mean) / self._std)[None]


def slide(
    predict: Callable[[Tensor], Tensor], image: Tensor, window: int, stride: int, batch: int = 1
) -> Tensor:
    """Return the mean over windows of the logits of an image (1, 3, height, width).

    Windows are `stride` pixels apart; the last ones are moved back inside. At most `batch` of them are
    predicted at once, and none of another image, so that a prediction depends on its image alone.
    """
    rows, columns = (_begins(side, window, stride) for side in image.shape[2:])
    places = [(..., slice(top, top + window), slice(left, left + window)) for top in rows for left in columns]
    counts, total = image.new_zeros(1, 1, *image.shape[2:]), image.new_zeros(0)
    for first in range(0, len(places), batch):
        group = places[first : first + batch]
        for place, logits in zip(group, predict(torch.cat([image[each] for each in group])), strict=True):
            if not len(total):
                total = logits.new_zeros(1, len(logits), *image.shape[2:])
            total[place] += logits
            counts[place] += 1
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
    counts = torch.bincount(pairs, minlength=(classes + 1) * classes)
    return counts.view(classes + 1, classes)[:-1]


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
