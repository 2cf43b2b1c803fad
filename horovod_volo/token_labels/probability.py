"""Class probabilities of label maps: a softmax over all classes, as in the token loss.

A cell stores the logits of its k best classes; the logits of all other classes are taken as 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def probabilities(scores: NDArray[np.float16], classes: int) -> Floats:
    """Return the probabilities of the stored classes; `scores` are logits (..., k, height, width)."""
    logits = scores.astype(np.float32)  # (..., k, height, width)
    highest = np.maximum(logits.max(axis=-3, keepdims=True), 0)
    stored = np.exp(logits - highest)
    others = (classes - logits.shape[-3]) * np.exp(-highest)
    result: Floats = stored / (stored.sum(axis=-3, keepdims=True) + others)
    return result


def best_classes(
    scores: NDArray[np.float16], ids: NDArray[np.integer[Any]], classes: int
) -> NDArray[np.int64]:
    """Return for each map (maps, k, height, width) the class with the highest summed probability (maps,)."""
    rows = np.arange(len(ids)).reshape(-1, 1, 1, 1)
    bins = (rows * classes + ids).ravel()  # one for each pair of map and class
    sums = np.bincount(bins, probabilities(scores, classes).ravel(), minlength=len(ids) * classes)
    best: NDArray[np.int64] = sums.reshape(len(ids), classes).argmax(axis=1)
    return best
