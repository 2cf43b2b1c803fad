"""What a rank has of its host and its GPU: the memory in use, and the peak of floating-point operations.

Peaks are those of products of dense matrices, as the data sheets of NVIDIA state them, without sparsity.
Nothing is assumed about a GPU or an arithmetic that is not listed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch

_GIB = 2**30
_STATM = Path("/proc/self/statm")
_HALF = ("fp16", "bf16")

# The first pattern that is found in a GPU's name: TFLOP/s of fp16 and bf16, of TF32, and of fp32.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"H200 NVL|H100 NVL", {"half": 835.0, "tf32": 417.0, "fp32": 60.0}),
    (r"H100 PCIe", {"half": 756.0, "tf32": 378.0, "fp32": 51.0}),
    (r"H100|H200", {"half": 989.0, "tf32": 494.0, "fp32": 67.0}),
    (r"A100\b", {"half": 312.0, "tf32": 156.0, "fp32": 19.5}),
    (r"A40\b", {"half": 149.7, "tf32": 74.8, "fp32": 37.4}),
    (r"A30\b", {"half": 165.0, "tf32": 82.0, "fp32": 10.3}),
    (r"A10\b", {"half": 125.0, "tf32": 62.5, "fp32": 31.2}),
    (r"L40S", {"half": 362.0, "tf32": 183.0, "fp32": 91.6}),
    (r"L4\b", {"half": 121.0, "tf32": 60.0, "fp32": 30.3}),
    (r"V100-SXM2", {"fp16": 125.0, "fp32": 15.7}),
    (r"V100-PCIE", {"fp16": 112.0, "fp32": 14.0}),
    (r"T4\b", {"fp16": 65.0, "fp32": 8.1}),
    (r"RTX 4090\b(?! D)", {"half": 165.2, "tf32": 82.6, "fp32": 82.6}),
    (r"RTX 3090\b(?! Ti)", {"half": 71.0, "tf32": 35.6, "fp32": 35.6}),
)


def host_memory_gib() -> float:
    """Return the resident memory of this process."""
    pages = int(_STATM.read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _GIB


def device_memory_gib(device: torch.device) -> tuple[float, float]:
    """Return what tensors use of a GPU now, and at most so far; 0 on a CPU. Does not synchronise."""
    if device.type != "cuda":
        return 0.0, 0.0
    allocated = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    return allocated[0] / _GIB, allocated[1] / _GIB


def peak_flops(gpu: str, precision: str) -> float:
    """Return the peak of a GPU by its name, in FLOP/s, for a value of --precision; 0: not known."""
    for pattern, peaks in _PEAKS:
        if re.search(pattern, gpu):
            kind = "half" if precision in _HALF and "half" in peaks else precision
            return 1e12 * peaks.get(kind, 0.0)
    return 0.0
