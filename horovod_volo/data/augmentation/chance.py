"""Random numbers that are a pure function of what they are for.

Invariant: a number depends on its stream, seed, epoch, sample and draw alone, never on which other
samples are asked for beside it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# The 64-bit finaliser of splitmix64: each input bit reaches every output bit.
GOLDEN_STEP = np.uint64(0x9E3779B97F4A7C15)
FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
SECOND_FACTOR = np.uint64(0x94D049BB133111EB)


def uniforms(
    stream: int, seed: int, epoch: int, indices: NDArray[np.int64], draws: int
) -> NDArray[np.float64]:
    """Return numbers in [0, 1), each a pure function of stream, seed, epoch, its index and its draw."""
    state = np.zeros((1, 1), dtype=np.uint64)
    for word in (stream, seed, epoch, indices[:, None], np.arange(draws)[None, :]):
        state = _mixed((state ^ np.asarray(word).astype(np.uint64)) + GOLDEN_STEP)
    high_bits = (state >> np.uint64(11)).astype(np.float64)  # (batch, draws); 53 bits, held exactly
    return high_bits / 2**53


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * FIRST_FACTOR
    words = (words ^ (words >> np.uint64(27))) * SECOND_FACTOR
    return words ^ (words >> np.uint64(31))
