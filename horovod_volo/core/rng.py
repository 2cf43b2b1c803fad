"""Counter-based random numbers: pure functions of a purpose, a seed and counters such as epoch or step.

There is no generator state to save: a resumed run draws what the interrupted one would have drawn, and a
sample's draws do not depend on its batch, its rank or the number of ranks.

Invariant: a number depends on its purpose and its counters alone. Each purpose has one user and always the
same counters. Changing a purpose's value or the hash changes the draws of all runs.
"""

from enum import IntEnum, unique
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

# splitmix64: every input bit reaches every output bit.
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK = 2**64 - 1
_MANTISSA_BITS = 53


@unique
class Purpose(IntEnum):
    """Every use of random numbers in training and packing; the values are arbitrary and distinct."""

    SAMPLE_ORDER = 0x6F72646572  # counters: seed, epoch
    BALANCED_ORDER = 0x62616C616E6365  # seed, epoch
    CROP_FLIP = 0x706C616E  # seed, epoch, sample
    RAND_AUGMENT = 0x6F7065726174  # seed, epoch, sample
    COLOR_JITTER = 0x6A6974746572  # seed, epoch, sample
    RANDOM_ERASING = 0x6572617365  # seed, epoch, sample
    ERASING_NOISE = 0x6E6F697365  # seed
    MIXTOKEN_BOX = 0x4D4958  # seed, step, rank, micro-batch
    IMAGE_MIX = 0x4D495855  # seed, step, rank, micro-batch
    DROP_PATH = 0x64726F70  # seed, step, rank, micro-batch
    PACKING_ORDER = 0x7061636B  # seed
    LEDGER = 0x6C6564676572  # seed, epoch, sample
    SCENE_PLAN = 0x7363656E65  # seed, epoch, sample
    BOX_PLAN = 0x626F78  # seed, epoch, sample
    BOX_WINDOW = 0x77696E646F77  # seed, epoch, sample, round


def random_bits(purpose: Purpose, *counters: int) -> int:
    """Return 64 random bits. It takes a few microseconds; seeding a generator takes tens."""
    return reduce(_next_state, (purpose, *counters), 0)


def uniforms(count: int, purpose: Purpose, *counters: int) -> list[float]:
    """Return `count` numbers in [0, 1)."""
    state = random_bits(purpose, *counters)
    return [(_next_state(state, draw) >> (64 - _MANTISSA_BITS)) / 2**_MANTISSA_BITS for draw in range(count)]


def uniforms_of_samples(
    count: int, purpose: Purpose, seed: int, epoch: int, samples: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return for each sample what `uniforms` returns for its counters, (batch, count)."""
    state = np.full((1, 1), random_bits(purpose, seed, epoch), dtype=np.uint64)
    for words in (samples[:, None], np.arange(count)[None, :]):
        state = _next_state(state, words.astype(np.uint64))
    numbers: NDArray[np.float64] = (state >> (64 - _MANTISSA_BITS)) / 2**_MANTISSA_BITS
    return numbers


def bits_of_samples(purpose: Purpose, seed: int, epoch: int, samples: NDArray[Any]) -> NDArray[np.uint64]:
    """Return 64 random bits for each sample."""
    state = np.full(1, random_bits(purpose, seed, epoch), dtype=np.uint64)
    bits: NDArray[np.uint64] = _next_state(state, samples.astype(np.uint64))
    return bits


def philox(purpose: Purpose, *counters: int) -> np.random.Philox:
    """Return numpy's counter-based bit generator, for long sequences; its raw words never change."""
    return np.random.Philox(key=random_bits(purpose, *counters))


def generator(bits: int) -> np.random.Generator:
    """Return numpy's generator for various distributions, seeded by 64 `random_bits`."""
    return np.random.Generator(np.random.Philox(key=bits))


def _next_state(state: Any, word: Any) -> Any:
    """Return the state after a word: both are Python's integers, or arrays of uint64, which wrap around."""
    mixed = ((state ^ word) + _INCREMENT) & _MASK
    mixed = (mixed ^ (mixed >> 30)) * _MULTIPLIER_1 & _MASK
    mixed = (mixed ^ (mixed >> 27)) * _MULTIPLIER_2 & _MASK
    return mixed ^ (mixed >> 31)
