"""Comparison of two pieces of work: equal results first, then paired timing.

The two sides alternate, A B B A A B B A. Each pair gives one ratio; the median ratio is reported with a 95 %
bootstrap interval over the pairs. Invariant: the members of a pair run directly after each other and neither
is always first, so that other load on the machine and clock drift affect both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

Action = Callable[[], object]
Block = Callable[[], float]  # runs some work and returns its seconds per call of the action
T = TypeVar("T")

BLOCK_SECONDS = 0.4  # long compared with the resolution of the clock and of the scheduler
_RESAMPLINGS = 10_000


class WrongResultError(RuntimeError):
    """The results of ours and of the peer differ by more than rounding."""


def assert_agree(what: str, ours: Tensor, peer: Tensor, tolerance: float) -> None:
    """Raise unless the largest difference is within `tolerance` times the peer's largest absolute value."""
    scale = float(peer.detach().abs().max())
    difference = float((ours.detach() - peer.detach()).abs().max())
    if not difference <= tolerance * scale:  # in this form a NaN raises too
        raise WrongResultError(
            f"{what}: ours and the peer's differ by {difference:.3g}, where the largest value is {scale:.3g} "
            f"and {tolerance:g} of it is allowed. Nothing was measured."
        )


@dataclass(frozen=True)
class Estimate:
    """A median or a mean with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def estimate(samples: Sequence[float]) -> Estimate:
    """Return the median with its bootstrap interval; equal samples give equal intervals."""
    values = np.asarray(samples)
    drawn = np.random.default_rng(0).choice(values, size=(_RESAMPLINGS, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return Estimate(float(np.median(values)), float(low), float(high))


@dataclass(frozen=True)
class Pairs:
    """Seconds of our work and of the peer's, pair by pair."""

    ours: tuple[float, ...]
    peer: tuple[float, ...]

    @property
    def times_faster(self) -> Estimate:
        """Estimate the peer's time divided by ours."""
        return estimate([peer / ours for ours, peer in zip(self.ours, self.peer, strict=True)])


def alternate(ours: Block, peer: Block, pairs: int) -> Pairs:
    """Run both blocks in alternation, `pairs` times each."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            seconds[side].append((ours, peer)[side]())
    return Pairs(tuple(seconds[0]), tuple(seconds[1]))


def timed(action: Action, repeats: int, device: torch.device) -> Block:
    """Make a block of `repeats` calls, timed from an idle device to an idle device."""

    def block() -> float:
        wait_for(device)
        began = perf_counter()
        for _ in range(repeats):
            action()
        wait_for(device)
        return (perf_counter() - began) / repeats

    return block


def repeats_for(action: Action, device: torch.device) -> int:
    """Return how many calls fill a block; calls the action twice."""
    action()  # the first call includes one-time work
    return max(1, math.ceil(BLOCK_SECONDS / timed(action, 1, device)()))


def block_of(action: Action, device: torch.device) -> Block:
    """Make a block of as many calls as fill it."""
    return timed(action, repeats_for(action, device), device)


def block_with_setup(setup: Callable[[], T], action: Callable[[T], object], device: torch.device) -> Block:
    """Make a block whose every call is given a new result of `setup`, which is not timed."""

    def once() -> float:
        prepared = setup()
        wait_for(device)
        began = perf_counter()
        action(prepared)
        wait_for(device)
        return perf_counter() - began

    once()  # the first call includes one-time work
    repeats = max(1, math.ceil(BLOCK_SECONDS / once()))
    return lambda: sum(once() for _ in range(repeats)) / repeats


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def default_device() -> torch.device:
    """Return the first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
