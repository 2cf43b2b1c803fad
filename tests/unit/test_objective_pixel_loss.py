"""The loss of pixels equals that of resized logits, value and gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from horovod_volo.core.batch import IGNORED
from horovod_volo.dense.upernet import pixel_cross_entropy, pixel_losses


@pytest.mark.parametrize("ignored", [0.0, 0.4, 1.0])
def test_it_is_the_sum_over_labelled_pixels_divided_by_all(ignored: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 7, 5, 9, requires_grad=True)
    masks = torch.randint(7, (3, 20, 35), dtype=torch.uint8)
    masks[torch.rand(masks.shape) < ignored] = IGNORED
    resized = F.interpolate(logits, size=masks.shape[1:], mode="bilinear", align_corners=False)
    plain = F.cross_entropy(resized, masks.long(), ignore_index=IGNORED, reduction="sum") / masks.numel()
    (expected,) = torch.autograd.grad(3.0 * plain, logits)
    loss = pixel_cross_entropy(logits, masks)
    (gradient,) = torch.autograd.grad(3.0 * loss, logits)
    assert torch.allclose(loss, plain, rtol=1e-6, atol=0)
    assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-9)
    assert (float(loss.detach()) > 0) == (ignored < 1)


def test_logits_of_half_the_bits_have_a_loss_in_fp32() -> None:
    logits = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    masks = torch.zeros(2, 32, 32, dtype=torch.uint8)
    half = logits.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        losses = pixel_losses(half, half, masks)
    exact = pixel_cross_entropy(half.detach().float(), masks)
    assert losses.total.dtype == torch.float32
    assert torch.allclose(losses.pixel_loss, exact)
    assert torch.allclose(losses.total, 1.4 * exact)
    losses.total.backward()  # type: ignore[no-untyped-call]
    assert half.grad is not None
    assert half.grad.dtype == torch.bfloat16
