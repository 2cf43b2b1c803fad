"""Run the fused outlook attention forward and backward on the cases of a file, in a separate process.

Triton chooses between compiling and interpreting when it is first imported, and torch's compiler imports it.
Its interpreter therefore needs a new process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

Case = tuple[Tensor, Tensor, Tensor, int, float]  # values, scores, gradient above, heads, scale
Pass = tuple[list[str], list[Tensor]]  # which kernels ran, then the output and both gradients


def run(cases: list[Case]) -> list[Pass]:
    """Return what each case gives."""
    from horovod_volo.kernels import outlook_kernels
    from horovod_volo.kernels.outlook import fused_outlook

    runs: list[str] = []
    for name in ("aggregate_windows", "scores_backward"):
        setattr(outlook_kernels, name, RecordedKernel(name, getattr(outlook_kernels, name), runs))
    passes = []
    for values, scores, above, heads, scale in cases:
        inputs = [tensor.detach().requires_grad_() for tensor in (values, scores)]
        mixed = fused_outlook(*inputs, heads, scale)
        found = [mixed.detach(), *torch.autograd.grad(mixed, inputs, above)]
        passes.append(([*runs], found))
        runs.clear()
    return passes


class RecordedKernel:
    """A kernel that records its name whenever it is launched."""

    def __init__(self, name: str, program: Any, runs: list[str]) -> None:
        self.name, self.program, self.runs = name, program, runs

    def __getitem__(self, grid: tuple[int]) -> Any:
        self.runs.append(self.name)
        return self.program[grid]


if __name__ == "__main__":
    torch.save(run(torch.load(sys.argv[1])), sys.argv[2])
