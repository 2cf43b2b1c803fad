"""How two pieces of work are compared on a machine that others use too.

They take turns, A B B A A B B A; each pair gives one ratio, and what is told is the median ratio with
a 95 % interval from resampling the pairs. Invariant: the members of a pair run next to each other and
neither is always first, so that a slow moment of the machine and a drift of its clock hit both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

Action = Callable[[], object]
Block = Callable[[], float]  # runs some work and returns its seconds, per call of the action

BLOCK_SECONDS = 0.4  # long beside the clock's and the scheduler's grain
_RESAMPLINGS = 10_000


@dataclass(frozen=True)
class Estimate:
    """A median, and the interval that holds it with 95 % confidence."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Pairs:
    """Seconds of our work and of the peer's, pair by pair."""

    ours: tuple[float, ...]
    peer: tuple[float, ...]

    @property
    def times_faster(self) -> Estimate:
        """Tell how many times the peer's time ours goes into."""
        return estimate([peer / ours for ours, peer in zip(self.ours, self.peer, strict=True)])


def alternate(ours: Block, peer: Block, pairs: int) -> Pairs:
    """Run both in turns until each has run `pairs` times."""
    our_seconds, peer_seconds = [], []
    for number in range(pairs):
        if number % 2 == 0:
            our_seconds.append(ours())
            peer_seconds.append(peer())
        else:
            peer_seconds.append(peer())
            our_seconds.append(ours())
    return Pairs(tuple(our_seconds), tuple(peer_seconds))


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median with its interval by bootstrap; the same samples give the same interval."""
    values = np.asarray(samples)
    drawn = np.random.default_rng(0).choice(values, size=(_RESAMPLINGS, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return Estimate(float(np.median(values)), float(low), float(high))


def timed(action: Action, repeats: int, device: torch.device) -> Block:
    """Make a block of so many calls, from an idle device to an idle device."""

    def block() -> float:
        wait_for(device)
        began = perf_counter()
        for _ in range(repeats):
            action()
        wait_for(device)
        return (perf_counter() - began) / repeats

    return block


def repeats_for(action: Action, device: torch.device) -> int:
    """Return how many calls fill a block, having called the action twice."""
    action()  # the first call pays for what is built only once
    return max(1, math.ceil(BLOCK_SECONDS / timed(action, 1, device)()))


def wait_for(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
