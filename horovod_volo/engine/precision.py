"""The arithmetic of a forward pass."""

from __future__ import annotations

import torch

_LOWER = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return what computes in a precision by its name; weights stay fp32."""
    dtype = _LOWER[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)
