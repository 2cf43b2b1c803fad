"""Triton kernels for NVIDIA GPUs, as torch operators. Launching one imports Triton, in a `*_kernels` module.

The choice between kernels and PyTorch's own operators holds for the whole process, which trains one model.
"""

from __future__ import annotations

from torch import Tensor

_DEVICES = ("cuda", "meta")  # on meta, memory and time of a step on a GPU are estimated
_choice = {"fused": True}


def use_fused_kernels(fused: bool) -> None:
    """Choose between the kernels and PyTorch's own operators for all following calls."""
    _choice["fused"] = fused


def runs_kernels(tensor: Tensor) -> bool:
    """Return whether operations on a tensor are to use the kernels."""
    return _choice["fused"] and tensor.device.type in _DEVICES
