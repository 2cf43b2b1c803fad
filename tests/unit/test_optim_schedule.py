"""The learning rate against timm's cosine scheduler, as published, and against torch's schedulers."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, PolynomialLR

import horovod_volo.models.timm_api  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.config.update_settings import Update
from horovod_volo.optim.schedule import SCHEDULES, find_decay, lr_at

CosineLRScheduler = pytest.importorskip("timm.scheduler").CosineLRScheduler

COOLDOWN = 10
COSINE = SCHEDULES.find("cosine")
TRAINING: dict[str, Any] = {"peak": 1.6e-3, "start": 1e-6, "floor": 1e-5, "warmup": 20, "decay_steps": 300}
FINE_TUNING = {"peak": 8e-6, "start": 1e-6, "floor": 4e-6, "warmup": 5, "decay_steps": 30}
LVVIT = {"peak": 1.6e-3, "start": 1e-6, "floor": 1e-5, "warmup": 5, "decay_steps": 300}
PUBLISHED = TRAINING | {"decay": COSINE}


def published_rates(
    peak: float, start: float, floor: float, warmup: int, decay_steps: int, *, prefix: bool = False
) -> list[float]:
    """Return the learning rate that timm's scheduler sets for each epoch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = CosineLRScheduler(
        optimizer,
        t_initial=decay_steps,
        lr_min=floor,
        warmup_t=warmup,
        warmup_lr_init=start,
        warmup_prefix=prefix,
        cycle_limit=1,
    )
    rates = []
    for epoch in range(prefix * warmup + decay_steps + COOLDOWN):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(epoch + 1)
    return rates


@pytest.mark.parametrize("steps", [1, 1251])
@pytest.mark.parametrize("settings", [TRAINING, FINE_TUNING, LVVIT], ids=["training", "fine-tuning", "lvvit"])
def test_each_epoch_begins_at_the_published_learning_rate(settings: dict[str, float], steps: int) -> None:
    expected = published_rates(**settings)
    of_steps = settings | {
        "warmup": settings["warmup"] * steps,
        "decay_steps": settings["decay_steps"] * steps,
    }
    rates = [lr_at(epoch * steps, decay=COSINE, **of_steps) for epoch in range(len(expected))]
    assert len(expected) in (310, 40)
    assert rates == pytest.approx(expected, rel=1e-9, abs=0)
    assert expected[0] == settings["start"]
    assert expected[-COOLDOWN:] == [settings["floor"]] * COOLDOWN
    # At the end of the warm-up the cosine is already below its peak.
    assert max(expected) < settings["peak"]


def test_lr_per_epoch_keeps_the_learning_rate_during_each_epoch() -> None:
    steps = 7
    of_steps = FINE_TUNING | {
        "warmup": FINE_TUNING["warmup"] * steps,
        "decay_steps": FINE_TUNING["decay_steps"] * steps,
    }
    rates = [lr_at(step, decay=COSINE, **of_steps, stride=steps) for step in range(40 * steps)]
    expected = [rate for rate in published_rates(**FINE_TUNING) for _ in range(steps)]
    assert rates == pytest.approx(expected, rel=1e-9, abs=0)


def test_a_warm_up_before_the_cosine_equals_timms() -> None:
    expected = published_rates(**TRAINING, prefix=True)
    rates = [lr_at(epoch, decay=COSINE, **TRAINING, prefix=TRAINING["warmup"]) for epoch in range(330)]
    assert rates == pytest.approx(expected, rel=1e-9, abs=0)
    assert max(rates) == pytest.approx(TRAINING["peak"], rel=1e-12)


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


STEPS = 40  # of the decay


def our_rates(settings: Update, *, floor: float) -> list[float]:
    sizes = {"peak": 0.5, "start": 0.0, "floor": floor, "warmup": 0, "decay_steps": STEPS}
    return [lr_at(step, decay=find_decay(settings), **sizes) for step in range(STEPS + 1)]


def rates_of(build: type[LRScheduler], **settings: Any) -> list[float]:
    """Return the learning rates of torch's scheduler for the same steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = build(optimizer, **settings)
    rates = []
    for _ in range(STEPS + 1):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("power", [0.9, 2.0])
def test_poly_is_torchs(power: float) -> None:
    expected = rates_of(PolynomialLR, total_iters=STEPS, power=power)
    assert our_rates(Update(sched="poly", poly_power=power), floor=0.0) == pytest.approx(expected, abs=1e-12)
    above_floor = [0.1 + 0.4 * rate / 0.5 for rate in expected]
    found = our_rates(Update(sched="poly", poly_power=power), floor=0.1)
    assert found == pytest.approx(above_floor, abs=1e-12)


def test_step_is_torchs_with_milestones_in_epochs() -> None:
    settings = Update(sched="step", epochs=20, decay_milestones="5, 15", decay_rate=0.3)
    expected = rates_of(MultiStepLR, milestones=[10, 30], gamma=0.3)  # two steps in an epoch
    assert our_rates(settings, floor=0.0)[:STEPS] == pytest.approx(expected[:STEPS])
