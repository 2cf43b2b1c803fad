"""Random numbers by place: the same for ever, evenly spread, and unlike those of any other place."""

from __future__ import annotations

import numpy as np

from horovod_volo.objective.draws import bits, uniform

ONE = "19b832b2b004c52a"
TWO = "7e711353f4426347a342c5c43fbbdaf3"


def test_a_place_has_its_numbers_for_ever() -> None:
    # Worked out by hand with another program: echo -n "1 2 3" | b2sum -l 64, and -l 128 for two numbers.
    assert bits(1, 2, 3) == int.from_bytes(bytes.fromhex(ONE), "little")
    first, second = bytes.fromhex(TWO[:16]), bytes.fromhex(TWO[16:])
    expected = [(int.from_bytes(part, "little") >> 11) / 2**53 for part in (first, second)]
    assert uniform(2, 1, 2, 3) == expected


def test_places_are_not_run_together() -> None:
    places = [(1, 23), (12, 3), (123,), (1, 2, 3), (-1, 23), (1, -23), (2**70, 0)]
    assert len({bits(*place) for place in places}) == len(places)


def test_numbers_fill_the_unit_interval_evenly_and_independently() -> None:
    drawn = np.array([uniform(3, 7, step) for step in range(20_000)])
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    counts = np.stack([np.histogram(column, bins=20, range=(0, 1))[0] for column in drawn.T])
    deviations = (counts - 1000) ** 2 / 1000
    assert deviations.sum(axis=1).max() < 45, "chi-square of 19 degrees of freedom: 1 in 1,000 exceeds 43.8"
    correlations = np.corrcoef(np.vstack([drawn.T, np.roll(drawn[:, 0], 1)]))
    assert np.abs(correlations - np.eye(4)).max() < 0.03
