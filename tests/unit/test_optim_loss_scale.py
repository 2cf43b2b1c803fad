"""The steps that a real gradient scaler skips are counted from its state alone."""

from __future__ import annotations

import random

import pytest
import torch

from horovod_volo.optim.loss_scale import SkippedSteps, overflows


def scaler_and_weight(interval: int) -> tuple[torch.amp.GradScaler, torch.nn.Parameter, torch.optim.SGD]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=interval)
    weight = torch.nn.Parameter(torch.ones(1))
    return scaler, weight, torch.optim.SGD([weight], lr=0.0)


@pytest.mark.parametrize("interval", [4, 7, 2000])
@pytest.mark.parametrize("steps_per_point", [1, 3])
def test_steps_that_overflow_are_counted(interval: int, steps_per_point: int) -> None:
    scaler, weight, optimizer = scaler_and_weight(interval)
    skipped = SkippedSteps(scaler)
    draw, expected = random.Random(interval), 0
    for step in range(1, 61):
        overflow = draw.random() < 0.15
        expected += overflow
        optimizer.zero_grad()
        scaler.scale(weight * (float("inf") if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % steps_per_point == 0:
            skipped.count(steps_per_point)
    assert skipped.total == expected


def test_without_a_scaler_steps_are_counted_one_by_one() -> None:
    skipped = SkippedSteps(torch.amp.GradScaler("cpu", enabled=False), total=2)
    skipped.add_not_finite()
    skipped.count(10)
    assert skipped.total == 3
    assert overflows({}, {}, 5) == 0


def test_a_state_that_was_replaced_is_no_overflow() -> None:
    scaler, _, _ = scaler_and_weight(2000)
    skipped = SkippedSteps(scaler)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 4.0})
    skipped.restart()
    skipped.count(0)
    assert skipped.total == 0
