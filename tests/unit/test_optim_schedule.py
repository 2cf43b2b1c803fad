"""The learning rate against the published schedule, computed in other ways."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from horovod_volo.core.errors import UserError
from horovod_volo.optim.schedule import SCHEDULES, lr_at, register_schedule

PUBLISHED: dict[str, Any] = {"peak": 1.6e-3, "start": 1e-6, "floor": 1e-5, "warmup": 20, "decay_steps": 300}
PUBLISHED["decay"] = SCHEDULES.find("cosine")


def published_table() -> list[float]:
    """Compute the learning rate of each of 310 epochs with numpy: warm-up, the rest of the cosine, cool-down.

    The cosine is the real part of a complex number that is rotated by 180 degrees in 300 equal steps.
    """
    warmup = np.linspace(1e-6, 1.6e-3, 21)[:20]
    turn = np.exp(1j * np.pi / 300)
    points = np.cumprod(np.full(300, turn)) / turn
    cosine = 1e-5 + (1.6e-3 - 1e-5) * (points.real + 1) / 2
    return [*warmup, *cosine[20:], *([1e-5] * 10)]


def test_the_published_schedule() -> None:
    rates = [lr_at(epoch, **PUBLISHED) for epoch in range(310)]
    assert rates == pytest.approx(published_table(), rel=1e-9)


@pytest.mark.parametrize(
    ("epoch", "rate"),
    [(0, 1e-6), (10, 8.005e-4), (19, 1.52005e-3), (20, 1.5826e-3), (150, 8.05e-4), (300, 1e-5), (309, 1e-5)],
)
def test_learning_rates_computed_by_hand(epoch: int, rate: float) -> None:
    assert lr_at(epoch, **PUBLISHED) == pytest.approx(rate, rel=5e-5)


def test_each_piece_is_monotone() -> None:
    steps = 100  # per epoch; the shape of each piece does not depend on it
    fine = PUBLISHED | {"warmup": 20 * steps, "decay_steps": 300 * steps}
    rates = [lr_at(step, **fine) for step in range(310 * steps)]
    pieces = rates[: 20 * steps], rates[20 * steps : 300 * steps + 1], rates[300 * steps :]
    assert all(one < other for one, other in itertools.pairwise(pieces[0]))
    assert all(one > other for one, other in itertools.pairwise(pieces[1]))
    assert set(pieces[2]) == {1e-5}
    assert rates[::steps] == pytest.approx(published_table(), rel=1e-9)
    assert max(rates) == pytest.approx(1.6e-3, rel=1e-3)
    assert max(rates) < 1.6e-3  # at the end of the warm-up the cosine is already below the peak


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    chosen = PUBLISHED | {"warmup": 0}
    assert lr_at(0, **chosen) == pytest.approx(1.6e-3, rel=1e-12)
    assert lr_at(299, **chosen) > 1e-5


def test_a_warm_up_as_long_as_the_cosine_ends_at_the_floor() -> None:
    chosen = PUBLISHED | {"warmup": 300}
    assert lr_at(299, **chosen) == pytest.approx(1.6e-3 - (1.6e-3 - 1e-6) / 300)
    assert lr_at(300, **chosen) == 1e-5


def test_with_a_floor_above_the_peak_the_learning_rate_rises() -> None:
    """Fine-tuning may set --min-lr above --lr; the curve is then mirrored."""
    chosen = PUBLISHED | {"peak": 1e-6, "warmup": 0, "decay_steps": 50}
    rates = [lr_at(step, **chosen) for step in range(60)]
    assert rates[0] == pytest.approx(1e-6)
    assert all(one < other for one, other in itertools.pairwise(rates[:51]))
    assert rates[50:] == [1e-5] * 10


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("linear", [0.0, 1.25, 1.7, 1.3, 0.9, 0.5, 0.5]),
        ("constant", [0.0, 1.25, 2.5, 2.5, 2.5, 0.5, 0.5]),
        ("half", [0.0, 1.25, 1.5, 1.5, 1.5, 0.5, 0.5]),
    ],
)
def test_other_decays(name: str, rates: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of warm-up are counted among five of decay; two of cool-down follow."""
    monkeypatch.setitem(SCHEDULES, "half", lambda _: 0.5)
    sizes = {"peak": 2.5, "start": 0.0, "floor": 0.5, "warmup": 2, "decay_steps": 5}
    assert [lr_at(step, decay=SCHEDULES.find(name), **sizes) for step in range(7)] == pytest.approx(rates)


def test_unknown_and_repeated_names_are_refused() -> None:
    with pytest.raises(UserError, match=r"There is no schedule 'cosin'. Did you mean cosine\? --sched takes"):
        SCHEDULES.find("cosin")
    with pytest.raises(UserError, match="The schedule 'linear' exists already"):
        register_schedule("linear", lambda passed: passed)
