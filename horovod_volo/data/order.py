"""Which images a rank reads next.

The order is a pure function of (seed, epoch) and a step takes the next global batch of it, so
that which images a step sees depends on the global batch alone, never on how many ranks share it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ORDER_STREAM = 0x6F72646572  # keeps this use of the seed apart from every other


def epoch_order(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    """Return the permutation of range(length) in which this epoch goes through the images."""
    source = np.random.Philox(np.random.SeedSequence([ORDER_STREAM, seed, epoch]))
    # Sorting raw words, not Generator.permutation: numpy promises the words never change between versions.
    return np.argsort(source.random_raw(length), kind="stable").astype(np.int64, copy=False)


def share_of_step(
    order: NDArray[np.int64], step_in_epoch: int, *, rank: int, size: int, batch: int, accumulation: int
) -> NDArray[np.int64]:
    """Return what this rank reads in a step: one row for each pass."""
    global_batch = size * batch * accumulation
    of_step = order[step_in_epoch * global_batch : (step_in_epoch + 1) * global_batch]
    return of_step[rank::size].reshape(accumulation, batch)  # (accumulation, batch)
