"""Which images a rank reads next.

The order is a pure function of its arguments and a step takes the next global batch of it, so that
which images a step sees depends on the global batch alone, never on how many ranks share it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.rng import Purpose, philox


def epoch_order(seed: int, epoch: int, length: int, *, block: int = 0, window: int = 1) -> NDArray[np.uint32]:
    """Return the permutation of range(length) in which this epoch goes through the images.

    With `block`, blocks of so many neighbours are shuffled, then the images within each `window` of
    consecutive shuffled blocks: storage then sees long reads of few places at a time.
    """
    source = philox(Purpose.SAMPLE_ORDER, seed, epoch)
    if not block:
        return _shuffled(source, length)
    blocks = _shuffled(source, -(-length // block))
    firsts = blocks * np.uint32(block)
    images: NDArray[np.uint32] = np.add.outer(firsts, np.arange(block, dtype=np.uint32)).ravel()
    inside = images < length  # the last block may be short
    windows = np.repeat(np.arange(len(blocks)) // window, block)[inside].astype(np.uint64)
    images = images[inside]
    return images[_order_within(windows, source)]


def rank_indices(
    order: NDArray[np.uint32], step_in_epoch: int, *, rank: int, size: int, batch: int, accumulation: int
) -> NDArray[np.int64]:
    """Return what this rank reads in a step: one row for each pass."""
    global_batch = size * batch * accumulation
    of_step = order[step_in_epoch * global_batch : (step_in_epoch + 1) * global_batch]
    return of_step[rank::size].reshape(accumulation, batch).astype(np.int64)  # (accumulation, batch)


def _shuffled(source: np.random.Philox, length: int) -> NDArray[np.uint32]:
    # Sorting raw words, not Generator.permutation: numpy promises the words never change between versions.
    # Each word's low half gives way to the place it stands at, so that sorting in place is enough and at
    # most 12 bytes an image are held. High halves that are equal leave their images in order.
    words = source.random_raw(length)
    words >>= np.uint64(32)
    words <<= np.uint64(32)
    words |= np.arange(length, dtype=np.uint32)
    words.sort()
    return words.astype(np.uint32)  # the low halves


def _order_within(windows: NDArray[np.uint64], source: np.random.Philox) -> NDArray[np.int64]:
    """Return the order that shuffles the images of each window among each other."""
    bits = np.uint64(int(windows[-1]).bit_length())
    chance = source.random_raw(len(windows)) >> bits
    # A shift by all 64 bits is undefined, so the only window stands above no bit at all.
    return np.argsort(chance | (windows << (np.uint64(64) - bits)) if bits else chance, kind="stable")
