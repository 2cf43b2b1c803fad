"""Outlook attention equals timm's in values and gradients, for all sizes and precisions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

# The reference is timm's module. timm_api comes first, because timm imports torchvision.
from horovod_volo.kernels import outlook_gather
from horovod_volo.models import timm_api
from horovod_volo.models.outlook import Outlook, outlook, plain_outlook

assert timm_api
from timm.models.volo import OutlookAttention  # noqa: E402

SIZES = [(8, 8), (7, 9), (4, 11), (1, 1), (1, 6), (2, 3)]
GEOMETRIES = [(3, 1, 2), (3, 1, 1), (5, 2, 3), (1, 0, 1), (5, 2, 2)]  # kernel, padding, stride


def pair(heads: int, kernel: int, padding: int, stride: int, dtype: torch.dtype) -> tuple[nn.Module, Outlook]:
    torch.manual_seed(0)
    theirs = OutlookAttention(6 * heads, heads, kernel, padding, stride, qkv_bias=True).to(dtype)
    return theirs, Outlook(copy.deepcopy(theirs))


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def value_and_gradients(module: nn.Module, pixels: Tensor) -> list[Tensor]:
    value = module(pixels)
    weights = drawn(*value.shape, dtype=value.dtype, seed=2).detach()
    return [value, *torch.autograd.grad(value, [pixels, *module.parameters()], weights)]


@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize(("kernel", "padding", "stride"), GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_timms(height, width, kernel, padding, stride, dtype) -> None:
    for heads in (1, 3):
        theirs, ours = pair(heads, kernel, padding, stride, dtype)
        pixels = drawn(2, height, width, 6 * heads, dtype=dtype)
        tolerance = {"rtol": 1e-5, "atol": 1e-5 if dtype == torch.float32 else 1e-12}
        expected, found = value_and_gradients(theirs, pixels), value_and_gradients(ours, pixels)
        torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_half_precision_adds_only_its_own_rounding(dtype: torch.dtype, tolerance: float) -> None:
    values, scores = drawn(2, 6, 5, 8).to(dtype), drawn(2, 3, 3, 2 * 81).to(dtype)
    found = outlook(values, scores, [3, 3, 2, 3, 1, 2], 0.7)
    exact = plain_outlook(values.double(), scores.double(), [3, 3, 2, 3, 1, 2], 0.7)
    assert found.dtype == dtype
    assert (found - exact).abs().max() <= tolerance * exact.abs().max()


def test_large_scores_do_not_overflow() -> None:
    values, scores = drawn(1, 4, 4, 8), 1e4 * drawn(1, 2, 2, 2 * 81)
    found = outlook(values.float(), scores.float(), [2, 2, 2, 3, 1, 2], 0.7)
    exact = plain_outlook(values, scores.float().double(), [2, 2, 2, 3, 1, 2], 0.7)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("images", [0, 1, 5])
def test_images_are_the_same_some_at_a_time_and_alone(images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, module = pair(3, 3, 1, 2, torch.float64)
    pixels = drawn(images, 6, 5, 18)
    alone = [value_and_gradients(module, each[None]) for each in pixels.detach().requires_grad_()]
    monkeypatch.setattr(outlook_gather, "_CHUNK_WEIGHTS", 2 * 9 * 9 * 3 * 9)  # two images of 3 x 3 windows
    value, of_pixels, *_ = value_and_gradients(module, pixels)
    assert value.shape == of_pixels.shape == pixels.shape
    for number, (own_value, *_) in enumerate(alone):
        torch.testing.assert_close(value[number], own_value[0], rtol=1e-12, atol=1e-12)


def test_pixels_may_be_a_view() -> None:
    theirs, ours = pair(2, 3, 1, 2, torch.float32)
    pixels = drawn(2, 12, 6, 5, dtype=torch.float32).permute(0, 2, 3, 1)
    torch.testing.assert_close(ours(pixels), theirs(pixels), rtol=1e-5, atol=1e-5)


def test_the_operation_is_registered_correctly_for_the_compiler() -> None:
    values, scores = drawn(2, 4, 5, 4, dtype=torch.float32), drawn(2, 2, 3, 2 * 81, dtype=torch.float32)
    operation = torch.ops.horovod_volo.outlook_gather.default
    torch.library.opcheck(operation, (values, scores, [2, 3, 2, 3, 1, 2], 0.7))
