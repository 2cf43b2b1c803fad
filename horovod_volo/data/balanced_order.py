"""The order of an epoch in which images of rare classes are drawn more often.

An epoch has as many draws as there are images. A class of n images gets a part of them in proportion to
n ** (1 - balance): with a balance of 0 as many as it has, with 0.5 in proportion to the root, with 1 as many
as every other class. Within a class all images are drawn equally often, or differ by one.

Draw `copy` of an image has the number image + copy x images. Its augmentation depends on this number, so that
copies differ, and each number is in an epoch at most once.

Invariant: the order is a pure function of its arguments, as in data/sampler.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.rng import Purpose, philox
from horovod_volo.data.sampler import permutation


def draws_of_classes(counts: NDArray[np.int64], balance: float) -> NDArray[np.int64]:
    """Return how many draws of an epoch each class gets, given the numbers of images; the sums are equal."""
    parts = np.where(counts > 0, counts.astype(np.float64) ** (1 - balance), 0)
    exact = parts * (counts.sum() / parts.sum())
    draws: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    # What rounding down leaves goes to the largest remainders; equal ones in the order of the classes.
    largest = np.argsort(np.where(counts > 0, draws - exact, 1), kind="stable")
    draws[largest[: counts.sum() - draws.sum()]] += 1
    return draws


def balanced_order(seed: int, epoch: int, classes: NDArray[np.int32], balance: float) -> NDArray[np.int64]:
    """Return the numbers of this epoch's draws, in their order; `classes` are those of all images."""
    images = len(classes)
    counts = np.bincount(classes)
    draws = draws_of_classes(counts, balance)
    source = philox(Purpose.BALANCED_ORDER, seed, epoch)
    shuffled = permutation(source, images)
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")].astype(np.int64)
    class_of, firsts = classes[by_class], counts.cumsum() - counts
    place = np.arange(images) - firsts[class_of]  # in the random order of the class
    each, more = np.divmod(draws, np.maximum(counts, 1))
    copies = each[class_of] + (place < more[class_of])
    numbers = np.repeat(by_class, copies)
    copy = np.arange(images) - np.repeat(copies.cumsum() - copies, copies)
    order: NDArray[np.int64] = (numbers + copy * images)[permutation(source, images)]
    return order
