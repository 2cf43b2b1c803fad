"""The statistics of paired measurements, on made-up timings and against exact probabilities."""

from __future__ import annotations

from math import comb
from time import sleep

import numpy as np
import pytest
import torch

from horovod_volo.bench import comparison as module
from horovod_volo.bench.comparison import PairedTimes, WrongResultError, alternate, assert_agree
from horovod_volo.bench.results import Figure

CPU = torch.device("cpu")


def test_sides_take_turns_in_being_first() -> None:
    calls: list[str] = []

    def block(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    result = alternate(lambda: block("a"), lambda: block("b"), pairs=4)
    assert "".join(calls) == "abbaabba"
    assert [times.tolist() for times in result] == [[1, 4, 5, 8], [2, 3, 6, 7]]


def test_the_ratio_is_the_median_of_pairs_not_of_sides() -> None:
    # A slow moment hits the second pair; the sides' medians would give 4 / 1.
    times = PairedTimes(ours=np.array([1.0, 10.0, 1.0]), peer=np.array([2.0, 20.0, 4.0]))
    found = Figure.of("", times.ratios, "x")
    assert found.value == 2.0
    assert (found.low, found.high) == (2.0, 4.0)


def exact_interval(samples: list[float]) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % points of a resampled median, from binomial probabilities."""
    ordered, size = sorted(samples), len(samples)
    majority = size // 2 + 1

    def at_most(rank: int) -> float:
        """Return the probability that the median of a resampling is among the `rank` smallest."""
        p = rank / size
        return sum(comb(size, n) * p**n * (1 - p) ** (size - n) for n in range(majority, size + 1))

    low = next(value for rank, value in enumerate(ordered, 1) if at_most(rank) > 0.025)
    high = next(value for rank, value in enumerate(ordered, 1) if at_most(rank) > 0.975)
    return low, high


@pytest.mark.parametrize("size", [3, 7, 11, 13, 25])
def test_the_interval_is_the_exact_one(size: int) -> None:
    samples = list(np.random.default_rng(size).permutation(np.arange(size) ** 1.5))
    found = Figure.of("", samples, "x")
    assert found.value == sorted(samples)[size // 2]
    assert (found.low, found.high) == exact_interval(samples)
    assert Figure.of("", samples, "x") == found


def test_a_block_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_SECONDS", 0.1)
    assert 2 <= module.repeats_for(module.timed(lambda: sleep(0.02), 1, CPU)) <= 5
    assert module.repeats_for(module.timed(lambda: sleep(0.2), 1, CPU)) == 1


def test_values_that_differ_are_refused() -> None:
    peer = torch.tensor([100.0, 0.0])
    assert_agree("sum", torch.tensor([100.0, 0.9]), peer, 0.01)
    for wrong in (1.1, float("nan"), float("inf")):
        with pytest.raises(WrongResultError, match=r"sum: .* Nothing was measured"):
            assert_agree("sum", torch.tensor([100.0, wrong]), peer, 0.01)


def test_peak_memory_counts_what_is_there_at_one_moment() -> None:
    def action() -> None:
        for _ in range(3):
            first = torch.ones(1000)
            second = first + 1
            del first
            del second

    assert 8000 <= module.peak_extra_bytes(action, CPU) < 8100  # beside two tensors, a few scalars
