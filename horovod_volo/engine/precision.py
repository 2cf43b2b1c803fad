"""The arithmetic of a forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_WRONG = 0.1  # relative error of a convolution; rounding to bf16 makes 0.003
_LOWER = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return what computes in a precision by its name; weights stay fp32."""
    dtype = _LOWER[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def remarks_on(precision: str, device: torch.device) -> list[str]:
    """Tell where a precision is slower than fp32 on this device."""
    if device.type != "cpu" or precision == "fp32":
        return []
    able = torch.cpu.get_capabilities()
    if able["architecture"] != "x86_64" or able[f"avx512_{precision}"] or able[f"amx_{precision}"]:
        return []
    return [f"this processor computes {precision} by way of fp32, many times slower: use --precision fp32"]


def mend_convolutions(model: nn.Module, precision: str, device: torch.device) -> list[str]:
    """Compute those convolutions in fp32 that this processor gets wrong in a lower precision; say which.

    On processors with AMX, torch 2.13 is wrong in bf16 for 16 input channels, kernel 4 and stride 4
    (tools/amx_convolution shows it). Remove this when the torch of setup.cfg has it right.
    """
    if device.type != "cpu" or precision == "fp32":
        return []
    shapes: dict[tuple[Any, ...], bool] = {}
    mended = []
    for name, module in model.named_modules():
        if type(module) is not nn.Conv2d:
            continue
        shape = _shape(module)
        if shape not in shapes:
            shapes[shape] = _is_wrong(module, _LOWER[precision])
        if shapes[shape]:
            module.__class__ = _Fp32Convolution  # survives a copy of the network, and changes no name in it
            mended.append(name)
    if not mended:
        return []
    return [f"this processor computes {', '.join(mended)} wrongly in {precision}: it is done in fp32"]


class _Fp32Convolution(nn.Conv2d):
    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, enabled=False):
            return super().forward(images.float())


def _shape(convolution: nn.Conv2d) -> tuple[Any, ...]:
    """Return all that chooses the library's program."""
    return (
        convolution.weight.shape,
        convolution.stride,
        convolution.padding,
        convolution.dilation,
        convolution.groups,
        convolution.padding_mode,
    )


@torch.no_grad()
def _is_wrong(convolution: nn.Conv2d, dtype: torch.dtype | None) -> bool:
    """Say whether the convolution's result in a lower precision is far from that in fp32."""
    random = torch.Generator().manual_seed(0)
    reach = [d * (k - 1) + 1 for k, d in zip(convolution.kernel_size, convolution.dilation, strict=True)]
    images = torch.randn(2, convolution.in_channels, 4 * reach[0], 4 * reach[1], generator=random)
    weights = torch.randn(convolution.weight.shape, generator=random)
    exact = convolution._conv_forward(images, weights, None)
    lower = convolution._conv_forward(images.to(dtype), weights.to(dtype), None).float()
    return bool((lower - exact).norm() > _WRONG * exact.norm())
