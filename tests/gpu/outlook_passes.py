"""Run the fused outlook attention forward and backward on the cases of a file, in a separate process.

Triton selects its interpreter when it is first imported, and torch.compile imports Triton: the interpreter
needs a new process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

Case = tuple[Tensor, Tensor, Tensor, int, float]  # values, scores, gradient above, heads, scale
Pass = tuple[list[str], list[Tensor]]  # names of the programs that ran; the output and both gradients


def run(cases: list[Case]) -> list[Pass]:
    """Return the outputs and gradients of each case."""
    from horovod_volo.kernels import outlook_programs
    from horovod_volo.kernels.outlook import fused_outlook

    runs: list[str] = []
    for name in ("gather", "differentiate_scores"):
        setattr(outlook_programs, name, Recorded(name, getattr(outlook_programs, name), runs))
    passes = []
    for values, scores, above, heads, scale in cases:
        inputs = [tensor.detach().requires_grad_() for tensor in (values, scores)]
        mixed = fused_outlook(*inputs, heads, scale)
        found = [mixed.detach(), *torch.autograd.grad(mixed, inputs, above)]
        passes.append(([*runs], found))
        runs.clear()
    return passes


class Recorded:
    """A Triton program that appends its name to `runs` when it is launched."""

    def __init__(self, name: str, program: Any, runs: list[str]) -> None:
        self.name, self.program, self.runs = name, program, runs

    def __getitem__(self, grid: tuple[int]) -> Any:
        self.runs.append(self.name)
        return self.program[grid]


if __name__ == "__main__":
    torch.save(run(torch.load(sys.argv[1])), sys.argv[2])
