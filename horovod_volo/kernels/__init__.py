"""Triton kernels for NVIDIA GPUs, as operators; `*_kernels` modules import Triton, when one is launched.

A process trains one model, so the choice between kernels and PyTorch's own operators is one for all.
"""

from __future__ import annotations

from torch import Tensor

_DEVICES = ("cuda", "meta")  # on meta, memory and time of a GPU's step are counted
_choice = {"fused": True}


def use_fused_kernels(fused: bool) -> None:
    """Choose between the kernels and PyTorch's own operators, for what is called from now on."""
    _choice["fused"] = fused


def runs_kernels(tensor: Tensor) -> bool:
    """Return whether operations on a tensor are to use the kernels."""
    return _choice["fused"] and tensor.device.type in _DEVICES
