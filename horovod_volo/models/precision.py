"""Autocast to bf16 or fp16, TF32, and convolutions that the CPU computes wrongly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_WRONG = 0.1  # relative error of a wrong convolution; rounding to bf16 causes 0.003
_AUTOCAST_DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the autocast context of a `--precision`; weights stay fp32."""
    dtype = _AUTOCAST_DTYPES[precision]
    kind = "cpu" if device.type == "meta" else device.type  # meta has no autocast
    return torch.autocast(kind, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def set_tf32(precision: str) -> None:
    """Let CUDA round the inputs of fp32 products and convolutions to TF32 with `--precision tf32` only.

    By default PyTorch does so in convolutions, but not in matrix products.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"


def precision_warnings(precision: str, device: torch.device) -> list[str]:
    """Return a warning if a precision has no effect on this device, or is slower than fp32."""
    if device.type != "cpu" or precision == "fp32":
        return []
    if precision == "tf32":
        return ["a CPU computes --precision tf32 in fp32"]
    if not hasattr(torch.cpu, "get_capabilities"):  # torch before 2.11: not known
        return []
    supports = torch.cpu.get_capabilities()
    if (
        supports["architecture"] != "x86_64"
        or supports[f"avx512_{precision}"]
        or supports[f"amx_{precision}"]
    ):
        return []
    return [f"this CPU emulates {precision} in fp32, which is many times slower: use --precision fp32"]


def fix_convolutions(model: nn.Module, precision: str, device: torch.device) -> list[str]:
    """Run the convolutions that this CPU computes wrongly in `precision` in fp32; return a warning if any.

    On CPUs with AMX, torch 2.13 computes bf16 convolutions of 16 input channels, kernel 4 and stride 4
    wrongly (tools/amx_convolution shows it). Remove this when every torch that setup.cfg allows computes them
    correctly.
    """
    dtype = _AUTOCAST_DTYPES[precision]
    if device.type != "cpu" or dtype is None:
        return []
    wrong_shapes: dict[tuple[Any, ...], bool] = {}
    fixed = []
    for name, module in model.named_modules():
        if type(module) is not nn.Conv2d:
            continue
        shape = _shape(module)
        if shape not in wrong_shapes:
            wrong_shapes[shape] = _is_wrong(module, dtype)
        if wrong_shapes[shape]:
            module.__class__ = _Fp32Conv2d  # survives copy.deepcopy, and leaves parameter names unchanged
            fixed.append(name)
    if not fixed:
        return []
    return [f"this CPU computes {', '.join(fixed)} wrongly in {precision}: fp32 is used for it"]


class _Fp32Conv2d(nn.Conv2d):
    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, enabled=False):
            return super().forward(images.float())


def _shape(convolution: nn.Conv2d) -> tuple[Any, ...]:
    """Return everything that oneDNN selects a kernel by."""
    return (
        convolution.weight.shape,
        convolution.stride,
        convolution.padding,
        convolution.dilation,
        convolution.groups,
        convolution.padding_mode,
    )


@torch.no_grad()
def _is_wrong(convolution: nn.Conv2d, dtype: torch.dtype) -> bool:
    """Return whether the convolution's result in `dtype` is far from its result in fp32, on random inputs."""
    random = torch.Generator().manual_seed(0)
    extent = [d * (k - 1) + 1 for k, d in zip(convolution.kernel_size, convolution.dilation, strict=True)]
    images = torch.randn(2, convolution.in_channels, 4 * extent[0], 4 * extent[1], generator=random)
    weights = torch.randn(convolution.weight.shape, generator=random)
    exact = convolution._conv_forward(images, weights, None)
    lower = convolution._conv_forward(images.to(dtype), weights.to(dtype), None).float()
    return bool((lower - exact).norm() > _WRONG * exact.norm())
