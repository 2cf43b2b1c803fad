"""The learning rate epoch by epoch beside timm's cosine scheduler, which the published training steps.

The published commands leave all but these settings as they are: one cycle, a warm-up inside it, one
rate for a whole epoch.
"""

from __future__ import annotations

import pytest
import torch

import horovod_volo.models.timm_api  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.optim.schedule import lr_at

CosineLRScheduler = pytest.importorskip("timm.scheduler").CosineLRScheduler

COOLDOWN = 10
TRAINING = {"peak": 1.6e-3, "start": 1e-6, "floor": 1e-5, "warmup": 20, "cosine": 300}
FINE_TUNING = {"peak": 8e-6, "start": 1e-6, "floor": 4e-6, "warmup": 5, "cosine": 30}
LVVIT = {"peak": 1.6e-3, "start": 1e-6, "floor": 1e-5, "warmup": 5, "cosine": 300}


def published_rates(
    peak: float, start: float, floor: float, warmup: int, cosine: int, *, prefix: bool = False
) -> list[float]:
    """Return the rate that timm's scheduler sets for each epoch, stepped after each one."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = CosineLRScheduler(
        optimizer,
        t_initial=cosine,
        lr_min=floor,
        warmup_t=warmup,
        warmup_lr_init=start,
        warmup_prefix=prefix,
        cycle_limit=1,
    )
    rates = []
    for epoch in range(prefix * warmup + cosine + COOLDOWN):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(epoch + 1)
    return rates


@pytest.mark.parametrize("steps", [1, 1251])
@pytest.mark.parametrize("settings", [TRAINING, FINE_TUNING, LVVIT], ids=["training", "fine-tuning", "lvvit"])
def test_each_epoch_begins_at_the_published_rate(settings: dict[str, float], steps: int) -> None:
    expected = published_rates(**settings)
    of_steps = settings | {"warmup": settings["warmup"] * steps, "cosine": settings["cosine"] * steps}
    rates = [lr_at(epoch * steps, **of_steps) for epoch in range(len(expected))]
    assert len(expected) in (310, 40)
    assert rates == pytest.approx(expected, rel=1e-9, abs=0)
    assert expected[0] == settings["start"]
    assert expected[-COOLDOWN:] == [settings["floor"]] * COOLDOWN
    # Where the warm-up ends, the cosine has already left its peak.
    assert max(expected) < settings["peak"]


def test_each_epoch_keeps_its_rate_where_that_is_asked_for() -> None:
    steps = 7
    of_steps = FINE_TUNING | {
        "warmup": FINE_TUNING["warmup"] * steps,
        "cosine": FINE_TUNING["cosine"] * steps,
    }
    rates = [lr_at(step, **of_steps, stride=steps) for step in range(40 * steps)]
    expected = [rate for rate in published_rates(**FINE_TUNING) for _ in range(steps)]
    assert rates == pytest.approx(expected, rel=1e-9, abs=0)


def test_a_warm_up_before_the_cosine_is_timms() -> None:
    expected = published_rates(**TRAINING, prefix=True)
    rates = [lr_at(epoch, **TRAINING, prefix=TRAINING["warmup"]) for epoch in range(330)]
    assert rates == pytest.approx(expected, rel=1e-9, abs=0)
    assert max(rates) == pytest.approx(TRAINING["peak"], rel=1e-12)
