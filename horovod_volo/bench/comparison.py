"""Comparison of two pieces of work: equal results first, then paired times.

The two sides alternate, A B B A A B B A, and each pair gives one ratio. Invariant: the members of a pair run
directly after each other and neither is always first, so that other load on the machine and clock drift
affect both.
"""

import math
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Action = Callable[[], object]
TimedBlock = Callable[[], float]  # runs some work and returns its seconds per call of the action

BLOCK_SECONDS = 0.4  # long compared with the resolution of the clock and of the scheduler


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


class PairedTimes(NamedTuple):
    """Seconds of our work and of the peer's, pair by pair."""

    ours: NDArray[np.float64]
    peer: NDArray[np.float64]

    @property
    def ratios(self) -> NDArray[np.float64]:
        """Return the peer's time divided by ours, of each pair."""
        return self.peer / self.ours


def alternate(ours: TimedBlock, peer: TimedBlock, pairs: int) -> PairedTimes:
    """Run both blocks in alternation, `pairs` times each."""
    seconds = np.empty((2, pairs))
    for number in range(pairs):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            seconds[side, number] = (ours, peer)[side]()
    return PairedTimes(*seconds)


def timed(action: Action, repeats: int, device: torch.device) -> TimedBlock:
    """Make a block of `repeats` calls, timed from an idle device to an idle device."""

    def block() -> float:
        wait_for(device)
        began = perf_counter()
        for _ in range(repeats):
            action()
        wait_for(device)
        return (perf_counter() - began) / repeats

    return block


def repeats_for(once: TimedBlock) -> int:
    """Return how many calls fill a block, given a block of one call; calls it twice."""
    once()  # the first call includes one-time work
    return max(1, math.ceil(BLOCK_SECONDS / once()))


def compare(ours: Action, peer: Action, device: torch.device, pairs: int) -> PairedTimes:
    """Run blocks of both actions in alternation."""
    one, other = (timed(each, repeats_for(timed(each, 1, device)), device) for each in (ours, peer))
    return alternate(one, other, pairs)


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def default_device() -> torch.device:
    """Return the first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
