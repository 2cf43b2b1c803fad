"""A rank that is slower than the others is named once, at the second log point in a row."""

from __future__ import annotations

import time

import pytest
import torch

from horovod_volo.monitor.stragglers import OwnTime, StepTimer, StragglerFinder

EVEN = [OwnTime(0.100), OwnTime(0.104), OwnTime(0.097)]
SLOW = [OwnTime(0.100), OwnTime(0.151, 0.05), OwnTime(0.097)]


def finder() -> StragglerFinder:
    return StragglerFinder(["red", "green", "blue"])


def test_a_straggler_is_named_at_the_second_log_point_and_once() -> None:
    ranks = finder()
    found = [ranks.find(times) for times in (EVEN, SLOW, SLOW, SLOW, EVEN, SLOW, SLOW)]
    message = (
        "warning: the other ranks wait for rank 1 on green: it takes 151 ms for its part of a step, they "
        "take 100 ms; of its time, 50 ms are waiting for data"
    )
    assert found == [None, None, message, None, None, None, message]


def test_another_straggler_each_time_is_noise() -> None:
    ranks = finder()
    for slow in (0, 1, 2, 0, 1, 2):
        assert ranks.find([OwnTime(0.2 if rank == slow else 0.1) for rank in range(3)]) is None


@pytest.mark.parametrize(("typical", "slowest"), [(0.0010, 0.0059), (1.0, 1.09)])
def test_small_differences_are_not_named(typical: float, slowest: float) -> None:
    ranks = finder()
    times = [OwnTime(typical), OwnTime(typical), OwnTime(slowest)]
    assert [ranks.find(times), ranks.find(times)] == [None, None]


def test_of_two_ranks_the_slower_one_is_named() -> None:
    ranks = StragglerFinder(["red", "green"])
    times = [OwnTime(0.1), OwnTime(0.2)]
    ranks.find(times)
    assert "wait for rank 1 on green" in str(ranks.find(times))


def test_only_the_own_part_of_a_step_is_measured() -> None:
    timer = StepTimer(torch.device("cpu"))
    assert timer.seconds_per_step() == 0.0
    for _ in range(2):
        timer.begin()
        time.sleep(0.02)
        timer.end()
        time.sleep(0.05)  # waits for others
    assert 0.02 <= timer.seconds_per_step() < 0.05
    timer.reset()
    assert timer.seconds_per_step() == 0.0
