"""Accuracy class by class, and what each class is mistaken for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.data.loader import NO_CLASS


class ClassScore(NamedTuple):
    """One class's share of the accuracy."""

    name: str
    images: int  # that could be read
    right: int  # at first
    mistaken_for: str  # the wrong class its images are most often taken for; empty: none was mistaken
    mistaken: int  # how many are taken for that one

    @property
    def top1(self) -> float:
        """Return the share of images that are right, in per cent; of no images it is nothing."""
        return 100 * self.right / max(1, self.images)


def class_scores(
    classes: Sequence[str], targets: NDArray[np.integer[Any]], taken: NDArray[np.integer[Any]]
) -> list[ClassScore]:
    """Return each class's score, the worst first, from each image's class and what it was taken for."""
    seen = taken != NO_CLASS
    # A matrix of classes would grow with their square; the pairs that do occur are no more than images.
    pairs, counts = np.unique(np.stack([targets[seen], taken[seen]], axis=1), axis=0, return_counts=True)
    images, right = np.zeros(len(classes), np.int64), np.zeros(len(classes), np.int64)
    mistaken, mistaken_for = np.zeros(len(classes), np.int64), np.full(len(classes), NO_CLASS)
    for (target, guess), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        images[target] += count
        if guess == target:
            right[target] = count
        elif count > mistaken[target]:  # of several equally often, the first class
            mistaken[target], mistaken_for[target] = count, guess
    scores = [
        ClassScore(
            name,
            int(images[number]),
            int(right[number]),
            classes[mistaken_for[number]] if mistaken[number] else "",
            int(mistaken[number]),
        )
        for number, name in enumerate(classes)
    ]
    return sorted(scores, key=lambda score: (score.images == 0, score.top1))
