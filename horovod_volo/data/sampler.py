"""The order of the training images in an epoch, and each rank's part of it.

An epoch has as many draws as there are images. With --aug-repeats they are the first images of the
permutation, each several times in a row. With `balance`, images of rare classes are drawn more often: a class
of n images gets a part of the epoch in proportion to n ** (1 - balance): with a balance of 0 as many draws as
it has images, with 0.5 in proportion to the root, with 1 as many as every other class. Within a class all
images are drawn equally often, or differ by one. Draw `copy` of an image has the number image + copy x
images. Its augmentation depends on this number, so that copies differ, and each number is in an epoch at most
once.

Invariant: the order is a pure function of its arguments, and a step takes the next global batch of it. Which
images a step sees depends on the global batch, never on the number of ranks.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.rng import Purpose, philox


def epoch_order(seed: int, epoch: int, length: int, *, block: int = 0, window: int = 1) -> NDArray[np.uint32]:
    """Return this epoch's permutation of range(length).

    With `block`, blocks of that many consecutive images are shuffled, then the images within each `window`
    of consecutive shuffled blocks: storage then serves long sequential reads.
    """
    source = philox(Purpose.SAMPLE_ORDER, seed, epoch)
    if not block:
        return permutation(source, length)
    blocks = permutation(source, -(-length // block))
    firsts = blocks * np.uint32(block)
    images: NDArray[np.uint32] = np.add.outer(firsts, np.arange(block, dtype=np.uint32)).ravel()
    inside = images < length  # the last block may be shorter
    windows = np.repeat(np.arange(len(blocks)) // window, block)[inside].astype(np.uint64)
    # Within each window: the images are sorted by it, then by random bits.
    bits = np.uint64(int(windows[-1]).bit_length())
    keys = source.random_raw(len(windows)) >> bits
    # With a single window there are no bits to set; a shift by 64 would be undefined.
    order = np.argsort(keys | (windows << (np.uint64(64) - bits)) if bits else keys, kind="stable")
    return images[inside][order]


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


def repeated_order(order: NDArray[Any], repeats: int) -> NDArray[np.int64]:
    """Return the numbers of an epoch's draws if each image of the order is drawn several times in a row."""
    draws = np.arange(len(order))
    numbers: NDArray[np.int64] = order[draws // repeats] + draws % repeats * len(order)
    return numbers


def packing_order(seed: int, length: int) -> NDArray[np.uint32]:
    """Return the permutation of range(length) in which images are packed into shards."""
    return permutation(philox(Purpose.PACKING_ORDER, seed), length)


def rank_indices(
    order: NDArray[Any],
    step_in_epoch: int,
    *,
    rank: int,
    size: int,
    global_batch: int,
    accumulation: int,
    micro_batch: int = 0,
) -> list[NDArray[np.int64]]:
    """Return the images of this rank in a step, an array for each micro-batch.

    Ranks, and micro-batches of a rank, differ by one image where the numbers do not divide the global batch.
    With `micro_batch`, the global batch is cut into such micro-batches, whatever the ranks, which share them.
    """
    of_step = order[step_in_epoch * global_batch : (step_in_epoch + 1) * global_batch]
    if micro_batch:
        return list(of_step.reshape(-1, micro_batch)[rank::size].astype(np.int64))
    return np.array_split(of_step[rank::size].astype(np.int64), accumulation)


def permutation(source: np.random.BitGenerator, length: int) -> NDArray[np.uint32]:
    """Return a random permutation of range(length)."""
    # Sorts raw words instead of calling Generator.permutation: numpy guarantees that raw words do not change
    # between versions. The low half of each word is replaced by its position, so that an in-place sort is
    # enough and memory stays at 12 bytes an image. Equal high halves stay in order.
    words = source.random_raw(length)
    words >>= np.uint64(32)
    words <<= np.uint64(32)
    words |= np.arange(length, dtype=np.uint32)
    words.sort()
    return words.astype(np.uint32)  # the low halves
