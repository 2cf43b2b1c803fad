"""Gradient clipping against torch's and timm's functions."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import horovod_volo.models.timm_api  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.optim.build import build_optimizer, set_lr
from horovod_volo.optim.clip import build_clip, divide

adaptive_clip_grad = pytest.importorskip("timm.utils").adaptive_clip_grad


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 2))
    with torch.no_grad():
        model[2].weight[1].zero_()  # a unit with norm 0
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
    divisor = clip(model, mode, bound)
    assert (divisor is not None) == (mode == "norm" and bound > 0)
    divide(plain_descent(model), divisor)  # in place, because SGD's kernel has no divisor
    return gradients(model)


def clip(model: nn.Module, mode: Literal["norm", "value", "agc"], bound: float) -> Tensor | None:
    parameters = dict(model.named_parameters())
    return build_clip(
        mode,
        bound,
        parameters,
        flat_gradients=gradients(model),
        heads=("3",),
        global_grad_norm=lambda norm: norm,
    )()


def plain_descent(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 100.0])
@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_gradients_are_clipped_as_by_torch_and_timm(
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


def test_without_a_bound_gradients_are_unchanged() -> None:
    found = clipped("norm", 0.0, 100.0)
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(with_gradients(100.0)), strict=True))


@pytest.mark.parametrize("scale", [1e-6, 100.0])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lars"])
def test_steps_equal_those_of_gradients_clipped_before(name: str, scale: float) -> None:
    """The weights do not depend on whether the optimizer's kernel divides, or a separate operation."""
    ours, theirs = with_gradients(scale), with_gradients(scale)
    start = [parameter.detach().clone() for parameter in ours.parameters()]
    optimizers = []
    for model in (ours, theirs):
        group = {"params": list(model.parameters()), "weight_decay": 0.1, "lr_scale": 1.0}
        optimizers.append(build_optimizer(name, [group], momentum=0.9))
        set_lr(optimizers[-1], 0.01)
    for _ in range(3):
        divide(optimizers[0], clip(ours, "norm", 0.5))
        optimizers[0].step()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizers[1].step()
    for found, expected, before in zip(ours.parameters(), theirs.parameters(), start, strict=True):
        assert not torch.equal(found, before)
        torch.testing.assert_close(found - before, expected - before, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite_reach_the_weights(bad: float) -> None:
    """Without a loss scale no step is skipped, and the error must become visible."""
    model = with_gradients(1.0)
    assert model[2].weight.grad is not None
    model[2].weight.grad[0, 0] = bad
    optimizer = build_optimizer(
        "adamw", [{"params": list(model.parameters()), "weight_decay": 0.0, "lr_scale": 1.0}], momentum=0.0
    )
    set_lr(optimizer, 0.01)
    divide(optimizer, clip(model, "norm", 0.5))
    optimizer.step()
    assert model[2].weight[0, 0].isnan()
