"""What the GPU itself reaches in the parts of VOLO's step: a copy, matrix products, and attention."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from horovod_volo.bench.comparison import Action, default_device, repeats_for, timed
from horovod_volo.bench.results import Figure, Result

_BLOCKS = 7
_TOKENS = 256 * 14 * 14  # of a batch of VOLO-D1's transformer stages
_PIXELS = 4 * _TOKENS  # of its outlookers
# Rows, inputs and outputs of D1's linear layers: attention, MLP, head; an outlooker's logits, values, MLP.
_PRODUCTS = (
    *((_TOKENS, *widths) for widths in ((384, 1152), (384, 384), (1152, 384), (384, 1000), (192, 486))),
    *((_PIXELS, *widths) for widths in ((192, 192), (192, 576), (576, 192))),
)
_ATTENTION = {"D1": (256, 12, 196, 32), "D5": (128, 16, 196, 48)}  # batch, heads, tokens, width
_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
_COPIED = 2**30  # bytes


def measure() -> Result:
    """Measure a copy, the products of VOLO-D1 in three directions, and the backends of attention."""
    device = default_device()
    return Result("ceilings", f"copy, products and attention in bf16, {device.type}", list(_figures(device)))


def _figures(device: torch.device) -> Iterator[Figure]:
    source = torch.empty(_COPIED // 2, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    yield Figure.of("copy", 2 * _COPIED / 1e9 / _seconds(lambda: target.copy_(source), device), "GB/s")
    for rows, width, outputs in _PRODUCTS:
        tokens = torch.randn(rows, width, dtype=torch.bfloat16, device=device)
        weight = torch.randn(outputs, width, dtype=torch.bfloat16, device=device)
        gradient = tokens @ weight.T
        flops = 2 * rows * width * outputs / 1e12
        name = f"{rows} x {width} x {outputs}"
        for direction, product in (
            ("forward", lambda: F.linear(tokens, weight)),  # noqa: B023
            ("gradient of tokens", lambda: gradient @ weight),  # noqa: B023
            ("gradient of weights", lambda: gradient.T @ tokens),  # noqa: B023
        ):
            yield Figure.of(f"{name}, {direction}", flops / _seconds(product, device), "TFLOP/s")
    for name, shape in _ATTENTION.items():
        inputs = [
            torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)
        ]
        for backend in _BACKENDS:
            try:
                with sdpa_kernel(backend):
                    seconds = _seconds(lambda: _attend(*inputs), device)  # noqa: B023
            except RuntimeError:  # this device or this build has no such backend
                continue
            yield Figure.of_seconds(f"attention of {name}, forward and backward, {backend.name}", seconds)


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> None:
    result = F.scaled_dot_product_attention(queries, keys, values)
    torch.autograd.grad(result, [queries, keys, values], result.detach())


def _seconds(action: Action, device: torch.device) -> NDArray[np.float64]:
    block = timed(action, repeats_for(timed(action, 1, device)), device)
    return np.array([block() for _ in range(_BLOCKS)])
