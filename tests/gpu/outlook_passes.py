"""Run the fused outlook attention forward and backward: of a file's cases, in a process of its own.

Triton decides between compiling and interpreting when it is first imported, and a process that has
imported torch's compiler has imported Triton. So its interpreter gets a fresh process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

Case = tuple[Tensor, Tensor, Tensor, int, float]  # values, scores, gradient above, heads, scale
Pass = tuple[list[str], list[Tensor]]  # which programs ran, then the mix and both gradients


def run(cases: list[Case]) -> list[Pass]:
    """Return what each case gives."""
    from horovod_volo.kernels import outlook_programs
    from horovod_volo.kernels.outlook import fused_outlook

    runs: list[str] = []
    for name in ("gather", "differentiate_scores"):
        setattr(outlook_programs, name, Told(name, getattr(outlook_programs, name), runs))
    passes = []
    for values, scores, above, heads, scale in cases:
        inputs = [tensor.detach().requires_grad_() for tensor in (values, scores)]
        mixed = fused_outlook(*inputs, heads, scale)
        found = [mixed.detach(), *torch.autograd.grad(mixed, inputs, above)]
        passes.append(([*runs], found))
        runs.clear()
    return passes


class Told:
    """A program that writes down its name whenever it is started."""

    def __init__(self, name: str, program: Any, runs: list[str]) -> None:
        self.name, self.program, self.runs = name, program, runs

    def __getitem__(self, grid: tuple[int]) -> Any:
        self.runs.append(self.name)
        return self.program[grid]


if __name__ == "__main__":
    torch.save(run(torch.load(sys.argv[1])), sys.argv[2])
