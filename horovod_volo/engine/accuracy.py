"""Exact accuracy on the held-out images, and the classes with the lowest: every image counts once, whatever
the number of ranks.

confusions.json in the run folder says what the worst classes are taken for, and which images were wrong. It
depends on nothing but the predictions of all images.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.core.batch import NO_CLASS, EvalBatch
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.engine.task import Metrics

CONFUSIONS = "confusions.json"
WORST_CLASSES, WRONG_IMAGES = 20, 4

Confusions = dict[str, Any]  # the content of confusions.json


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


class ImageScores:
    """Counts correct predictions of this rank, and collects its predicted classes.

    All stays on the device until `gather`: the host does not wait for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(5, dtype=torch.float64, device=device)  # in the order of EvalCounts
        self._batches: list[tuple[NDArray[np.int64], Tensor, Tensor]] = []

    def add(self, batch: EvalBatch, logits: Tensor) -> None:
        """Add the logits of a batch (batch, classes)."""
        logits, bad = logits.float(), batch.classes == NO_CLASS
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (batch, 5)
        correct = best == batch.classes[:, None]
        loss = F.cross_entropy(logits, batch.classes, reduction="sum", ignore_index=NO_CLASS)
        sums = correct[:, 0].sum(), correct.any(dim=1).sum(), loss, (~bad).sum(), bad.sum()
        self._counts += torch.stack(sums)
        predictions = torch.where(bad, NO_CLASS, best[:, 0])
        self._batches.append((batch.indices, predictions, logits.softmax(dim=1).amax(dim=1)))

    def gather(
        self, catalog: Catalog, world: World
    ) -> tuple[EvalCounts, NDArray[np.int64], NDArray[np.float32]]:
        """Return the sums, and the predicted class of every image and its probability, both (images,).

        Damaged images have NO_CLASS. Collective: every rank calls this; raise RuntimeError unless the ranks
        cover the catalog exactly.
        """
        top1, top5, loss_sum, images, bad_samples = world.sum_over_ranks(*self._counts.tolist())
        if images + bad_samples != len(catalog):
            raise RuntimeError(f"evaluation covered {images + bad_samples:.0f} images of {len(catalog)}")
        if not images:
            raise AllRanksError(f"none of the images in {catalog.source} can be read.")
        counts = EvalCounts(int(top1), int(top5), loss_sum, int(images), int(bad_samples))
        own = [(indices, *(part.cpu().numpy() for part in parts)) for indices, *parts in self._batches]
        predictions, probabilities = np.full(len(catalog), NO_CLASS), np.zeros(len(catalog), np.float32)
        for batches in world.allgather_object(own):
            for indices, batch_predictions, batch_probabilities in batches:
                predictions[indices] = batch_predictions
                probabilities[indices] = np.nan_to_num(batch_probabilities)
        return counts, predictions, probabilities


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
