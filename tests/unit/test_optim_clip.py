"""Bounds on gradients against torch's and timm's own."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import horovod_volo.models.timm_door  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.optim.clip import build_clip

adaptive_clip_grad = pytest.importorskip("timm.utils").adaptive_clip_grad


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 2))
    with torch.no_grad():
        model[2].weight[1].zero_()  # a unit that has no norm
    return model


def with_gradients(scale: float) -> nn.Sequential:
    model, random = network(), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=random)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def clipped(mode: Literal["norm", "value", "agc"], bound: float, scale: float) -> list[Tensor]:
    model = with_gradients(scale)
    build_clip(mode, bound, dict(model.named_parameters()), heads=("3",), whole_norm=lambda norm: norm)()
    return gradients(model)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 100.0])
@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_gradients_are_bounded_as_by_torch_and_timm(
    mode: Literal["norm", "value", "agc"], scale: float
) -> None:
    expected = with_gradients(scale)
    if mode == "norm":
        nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
    elif mode == "value":
        nn.utils.clip_grad_value_(expected.parameters(), 0.5)
    else:
        adaptive_clip_grad(list(expected.parameters())[:-2], clip_factor=0.5)
    found = clipped(mode, 0.5, scale)
    changed = any(not torch.equal(a, b) for a, b in zip(found, gradients(with_gradients(scale)), strict=True))
    assert changed == (scale >= 1.0)
    for ours, theirs in zip(found, gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_no_bound_changes_nothing() -> None:
    found = clipped("norm", 0.0, 100.0)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(with_gradients(100.0)), strict=True))
