"""CUDA's autocast and its choices of attention and of memory formats, for the meta device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What CUDA's autocast casts, of the functions that these networks call.
_TO_BF16 = {F.linear, F.conv2d, F.scaled_dot_product_attention, torch.einsum}
_TO_BF16 |= {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
_TO_FP32 = {F.layer_norm, F.softmax, torch.softmax, Tensor.softmax, F.log_softmax, F.cross_entropy}


class CudaAutocast(TorchFunctionMode):
    """Casts to bf16 and back as CUDA's autocast does, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._cast: dict[int, tuple[Tensor, Tensor]] = {}  # autocast casts each weight once

    def __enter__(self) -> CudaAutocast:
        self._cast.clear()
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)  # for code that asks; on meta it casts nothing
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        torch.set_autocast_enabled("cuda", False)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TO_BF16:
            args = tuple(map(self._to_bf16, args))
            kwargs = {key: self._to_bf16(value) for key, value in kwargs.items()}
        elif func in _TO_FP32:
            args = tuple(map(_to_fp32, args))
        if func is F.scaled_dot_product_attention and args[0].dtype == torch.bfloat16:
            # The flash kernel, which meta would not choose.
            return torch.ops.aten._scaled_dot_product_flash_attention(*args[:3])[0]
        return func(*args, **kwargs)

    def _to_bf16(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(torch.bfloat16)
        if id(value) not in self._cast:
            self._cast[id(value)] = (value, value.to(torch.bfloat16))
        return self._cast[id(value)][1]


def _to_fp32(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.dtype == torch.bfloat16
    return value.float() if half else value


def in_cuda_memory_format(name: str, args: tuple[Any, ...], result: Any) -> Any:
    """Return an operator's result in the memory format that it has on CUDA, where meta has another."""
    channels_last = torch.channels_last
    if name == "convolution" and _is_channels_last(args[0]):
        return torch.empty_like(result, memory_format=channels_last)
    if name == "convolution_backward" and _is_channels_last(args[1]) and result[0] is not None:
        return (torch.empty_like(result[0], memory_format=channels_last), *result[1:])
    return result


def _is_channels_last(images: Tensor) -> bool:
    return not images.is_contiguous() and images.is_contiguous(memory_format=torch.channels_last)
