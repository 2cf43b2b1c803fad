"""What a label map says of its cells: how probable each of its classes is there.

As in the loss: a softmax over all classes in which those that the map does not name have the logit zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def probabilities(scores: NDArray[np.float16], classes: int) -> Floats:
    """Return how probable each named class is; a cell's classes lie along the third axis from the end."""
    logits = scores.astype(np.float32)  # (..., k, height, width)
    highest = np.maximum(logits.max(axis=-3, keepdims=True), 0)
    named = np.exp(logits - highest)
    unnamed = (classes - logits.shape[-3]) * np.exp(-highest)
    shares: Floats = named / (named.sum(axis=-3, keepdims=True) + unnamed)
    return shares


def best_classes(
    scores: NDArray[np.float16], ids: NDArray[np.integer[Any]], classes: int
) -> NDArray[np.int64]:
    """Return the class of each map (maps, k, height, width) whose probability over all cells is highest."""
    rows = np.arange(len(ids)).reshape(-1, 1, 1, 1)
    places = (rows * classes + ids).ravel()  # of (map, class)
    sums = np.bincount(places, probabilities(scores, classes).ravel(), minlength=len(ids) * classes)
    best: NDArray[np.int64] = sums.reshape(len(ids), classes).argmax(axis=1)
    return best
