"""The learning rate against the published schedule, worked out by other means."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from horovod_volo.optim.schedule import lr_at

PUBLISHED: dict[str, Any] = {"peak": 1.6e-3, "start": 1e-6, "floor": 1e-5, "warmup": 20, "cosine": 300}


def published_table() -> list[float]:
    """Work out the rate of each of 310 epochs with numpy: warm-up, the cosine's rest, cool-down.

    The cosine is the real part of a point that goes half around a circle in 300 equal turns.
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
def test_rates_worked_out_by_hand(epoch: int, rate: float) -> None:
    assert lr_at(epoch, **PUBLISHED) == pytest.approx(rate, rel=5e-5)


def test_each_piece_is_monotone() -> None:
    steps = 100  # an epoch: the pieces keep their shape at any number of steps
    fine = PUBLISHED | {"warmup": 20 * steps, "cosine": 300 * steps}
    rates = [lr_at(step, **fine) for step in range(310 * steps)]
    pieces = rates[: 20 * steps], rates[20 * steps : 300 * steps + 1], rates[300 * steps :]
    assert all(one < other for one, other in itertools.pairwise(pieces[0]))
    assert all(one > other for one, other in itertools.pairwise(pieces[1]))
    assert set(pieces[2]) == {1e-5}
    assert rates[::steps] == pytest.approx(published_table(), rel=1e-9)
    assert max(rates) == pytest.approx(1.6e-3, rel=1e-3)
    assert max(rates) < 1.6e-3  # the warm-up ends where the cosine has already left the peak


def test_without_warm_up_the_first_step_has_the_peak() -> None:
    chosen = PUBLISHED | {"warmup": 0}
    assert lr_at(0, **chosen) == pytest.approx(1.6e-3, rel=1e-12)
    assert lr_at(299, **chosen) > 1e-5


def test_a_warm_up_as_long_as_the_cosine_ends_at_the_floor() -> None:
    chosen = PUBLISHED | {"warmup": 300}
    assert lr_at(299, **chosen) == pytest.approx(1.6e-3 - (1.6e-3 - 1e-6) / 300)
    assert lr_at(300, **chosen) == 1e-5


def test_a_floor_above_the_peak_is_risen_to() -> None:
    """Fine-tuning may ask for --min-lr above --lr: the curve is the same, upside down."""
    rates = [lr_at(step, peak=1e-6, start=1e-6, floor=1e-5, warmup=0, cosine=50) for step in range(60)]
    assert rates[0] == pytest.approx(1e-6)
    assert all(one < other for one, other in itertools.pairwise(rates[:51]))
    assert rates[50:] == [1e-5] * 10
