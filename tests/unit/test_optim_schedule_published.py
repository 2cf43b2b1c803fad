"""The learning rate of each epoch against timm's cosine scheduler, which the published training uses.

The published commands set no other options of it: one cycle, a warm-up inside it, and one learning rate for
each epoch.
"""

from __future__ import annotations

import pytest
import torch

import horovod_volo.models.timm_api  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.optim.schedule import SCHEDULES, lr_at

CosineLRScheduler = pytest.importorskip("timm.scheduler").CosineLRScheduler

COOLDOWN = 10
TRAINING = {"peak": 1.6e-3, "start": 1e-6, "floor": 1e-5, "warmup": 20, "decay_steps": 300}
FINE_TUNING = {"peak": 8e-6, "start": 1e-6, "floor": 4e-6, "warmup": 5, "decay_steps": 30}
LVVIT = {"peak": 1.6e-3, "start": 1e-6, "floor": 1e-5, "warmup": 5, "decay_steps": 300}
COSINE = SCHEDULES.find("cosine")


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
