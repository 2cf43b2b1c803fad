"""The arithmetic of a forward pass."""

from __future__ import annotations

import torch

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
