"""Accuracy per class, and the most frequent wrong prediction of each class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.batch import NO_CLASS


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
    valid = predictions != NO_CLASS
    # Count (target, prediction) pairs: a confusion matrix would grow with the square of the classes.
    pairs = np.stack([targets[valid], predictions[valid]], axis=1)
    pairs, counts = np.unique(pairs, axis=0, return_counts=True)
    images, right = np.zeros(len(classes), np.int64), np.zeros(len(classes), np.int64)
    mistaken, mistaken_for = np.zeros(len(classes), np.int64), np.full(len(classes), NO_CLASS)
    for (target, prediction), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        images[target] += count
        if prediction == target:
            right[target] = count
        elif count > mistaken[target]:  # if several are equally frequent, the first class
            mistaken[target], mistaken_for[target] = count, prediction
    results = [
        ClassResult(
            name,
            int(images[number]),
            int(right[number]),
            classes[mistaken_for[number]] if mistaken[number] else "",
            int(mistaken[number]),
        )
        for number, name in enumerate(classes)
    ]
    return sorted(results, key=lambda result: (result.images == 0, result.top1))
