"""Exact accuracy on the held-out images, and the classes with the lowest: every image counts once, whatever
the number of ranks.

confusions.json in the run folder and the picture `worst_confusions` in TensorBoard show what the worst
classes are taken for, and images that were wrong. Both depend on nothing but the predictions of all images.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.core.batch import NO_CLASS, EvalBatch
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.loader import EvalLoader
from horovod_volo.engine.task import Metrics

CONFUSIONS = "confusions.json"
WORST_CLASSES, WRONG_IMAGES = 20, 4

Confusions = dict[str, Any]  # the content of confusions.json
# Given a batch, its predicted classes (batch,) and their probabilities (batch,).
OnBatch = Callable[[EvalBatch, Tensor, Tensor], object]


class EvalCounts(NamedTuple):
    """Sums over the images of all ranks."""

    top1: int  # images whose class is predicted first
    top5: int  # images whose class is among the first five predictions
    loss_sum: float
    images: int
    bad_samples: int  # damaged images, which are in none of the other sums

    def metrics(self) -> Metrics:
        """Return top-1 and top-5 in per cent, the mean loss, and the numbers of images."""
        return {
            "top1": 100 * self.top1 / self.images,
            "top5": 100 * self.top5 / self.images,
            "loss": self.loss_sum / self.images,
            "images": self.images,
            "bad_samples": self.bad_samples,
        }


def count_correct(
    model: nn.Module,
    loader: EvalLoader,
    device: torch.device,
    on_batch: OnBatch = lambda batch, predictions, probabilities: None,  # noqa: ARG005
) -> Tensor:
    """Return this rank's sums in the order of EvalCounts (5,); they stay on the device."""
    counts = torch.zeros(5, dtype=torch.float64, device=device)
    for batch in loader:
        logits = model(batch.images).float()  # (batch, classes)
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (batch, 5)
        correct = best == batch.classes[:, None]
        loss = F.cross_entropy(logits, batch.classes, reduction="sum", ignore_index=NO_CLASS)
        bad = (batch.classes == NO_CLASS).sum()
        counts += torch.stack([correct[:, 0].sum(), correct.any(dim=1).sum(), loss, len(logits) - bad, bad])
        on_batch(batch, best[:, 0], logits.softmax(dim=1).amax(dim=1))
    return counts


def sum_counts(counts: Tensor, catalog: Catalog, world: World) -> EvalCounts:
    """Sum the ranks' counts; raise RuntimeError unless they cover the catalog exactly. Collective."""
    top1, top5, loss_sum, images, bad_samples = world.sum_over_ranks(*counts.tolist())
    if images + bad_samples != len(catalog):
        raise RuntimeError(f"evaluation covered {images + bad_samples:.0f} images of {len(catalog)}")
    if not images:
        raise UserError(f"none of the images in {catalog.source} can be read.")
    return EvalCounts(int(top1), int(top5), loss_sum, int(images), int(bad_samples))


class PredictionCollector:
    """Collects the predicted classes of this rank's images on the device, without synchronising with it."""

    def __init__(self) -> None:
        self.done = 0  # images of this rank
        self._indices: list[NDArray[np.int64]] = []
        self._predictions: list[Tensor] = []
        self._probabilities: list[Tensor] = []

    def add(self, batch: EvalBatch, predictions: Tensor, probabilities: Tensor) -> None:
        """Add the predicted classes of a batch and their probabilities, both (batch,).

        Damaged images get NO_CLASS.
        """
        self._indices.append(batch.indices)
        self._predictions.append(torch.where(batch.classes == NO_CLASS, NO_CLASS, predictions))
        self._probabilities.append(probabilities)
        self.done += len(batch.indices)

    def gather(self, world: World, images: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the predicted class of every image of the catalog and its probability, both (images,).

        Collective: every rank calls this.
        """
        own: tuple[NDArray[Any], ...] = (
            np.empty(0, np.int64),
            np.empty(0, np.int32),
            np.empty(0, np.float32),
        )
        if self._indices:
            own = (
                np.concatenate(self._indices),
                torch.cat(self._predictions).to(torch.int32).cpu().numpy(),
                torch.cat(self._probabilities).float().cpu().numpy(),
            )
        predictions, probabilities = np.full(images, NO_CLASS), np.zeros(images, np.float32)
        for of_rank, rank_predictions, rank_probabilities in world.allgather_object(own):
            predictions[of_rank] = rank_predictions
            probabilities[of_rank] = np.nan_to_num(rank_probabilities)
        return predictions, probabilities


class ClassResult(NamedTuple):
    """The result of one class."""

    name: str
    images: int  # without damaged ones
    right: int  # images that are predicted correctly
    mistaken_for: str  # the most frequent wrong prediction; empty: there is none
    mistaken: int  # images with that prediction

    @property
    def top1(self) -> float:
        """Return the accuracy in per cent; 0 without images."""
        return 100 * self.right / max(1, self.images)


def class_results(
    classes: Sequence[str], targets: NDArray[np.integer[Any]], predictions: NDArray[np.integer[Any]]
) -> list[ClassResult]:
    """Return each class's result, the worst first, from the true and the predicted class of each image."""
    seen = predictions != NO_CLASS
    # A confusion matrix would grow with the square of the classes. Sorted, so that of several predictions
    # that are equally frequent, the first class is named.
    counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for target, prediction in sorted(zip(targets[seen].tolist(), predictions[seen].tolist(), strict=True)):
        counts[target][prediction] += 1
    results = []
    for number, name in enumerate(classes):
        images, right = counts[number].total(), counts[number].pop(number, 0)
        ((other, mistaken),) = counts[number].most_common(1) or [(number, 0)]
        results.append(ClassResult(name, images, right, classes[other] if mistaken else "", mistaken))
    return sorted(results, key=lambda result: (result.images == 0, result.top1))


def find_confusions(
    images: Catalog, predictions: NDArray[np.int64], probabilities: NDArray[np.float32]
) -> Confusions:
    """Return the classes of lowest accuracy, with the images that were wrong with the highest probability."""
    targets, classes, seen = np.asarray(images.targets), images.classes, predictions != NO_CLASS
    results = class_results(classes, targets, predictions)
    wrong = seen & (predictions != targets)

    def wrong_images(name: str) -> list[dict[str, Any]]:
        own = np.flatnonzero(wrong & (targets == classes.index(name)))
        # Rounded, because a probability differs in its last bits with the batch that an image is in; of equal
        # ones, the stable sort takes the first image of the list.
        own = own[np.argsort(-probabilities[own].round(3), kind="stable")][:WRONG_IMAGES]
        return [
            {
                "index": index,
                "name": images.name(index),
                "location": images.location(index),
                "taken_for": classes[predictions[index]],
                "probability": round(float(probabilities[index]), 3),
            }
            for index in own.tolist()
        ]

    worst = [result for result in results if result.right < result.images][:WORST_CLASSES]
    return {
        "top1": 100 * int((seen & ~wrong).sum()) / max(1, int(seen.sum())),
        "images": int(seen.sum()),
        "classes": len(classes),
        "image_list": images.digest,
        "worst": [result._asdict() | {"wrong": wrong_images(result.name)} for result in worst],
    }
