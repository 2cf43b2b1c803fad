"""Runs fused outlook attention forward and backward on the cases of a file, in a separate process.

Triton chooses between compiling and interpreting when it is first imported, and torch's compiler imports it.
The interpreter therefore needs a process of its own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

Case = tuple[Tensor, Tensor, Tensor, int, float]  # values, scores, gradient of the output, heads, scale
Result = tuple[list[str], list[Tensor]]  # the names of the launched kernels; the output and both gradients


def run(cases: list[Case]) -> list[Result]:
    """Return the result of each case."""
    from horovod_volo.kernels import outlook_kernels
    from horovod_volo.kernels.outlook import fused_outlook

    runs: list[str] = []
    for name in ("softmax_sums", "aggregate_windows", "logits_backward"):
        setattr(outlook_kernels, name, RecordedKernel(name, getattr(outlook_kernels, name), runs))
    results = []
    for values, scores, grad_output, heads, scale in cases:
        inputs = [tensor.detach().requires_grad_() for tensor in (values, scores)]
        mixed, _ = fused_outlook(*inputs, heads, scale)
        found = [mixed.detach(), *torch.autograd.grad(mixed, inputs, grad_output)]
        results.append(([*runs], found))
        runs.clear()
    return results


class RecordedKernel:
    """A kernel that records its name at each launch."""

    def __init__(self, name: str, program: Any, runs: list[str]) -> None:
        self.name, self.program, self.runs = name, program, runs

    def __getitem__(self, grid: tuple[int]) -> Any:
        self.runs.append(self.name)
        return self.program[grid]


def multiply_bf16_in_interpreter() -> None:
    """Let Triton's interpreter multiply bf16 matrices: it would multiply their bits, as integers."""
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def widened(self: Any, *operands: Any) -> Any:
        is_bf16 = [operand.dtype.scalar == tl.bfloat16 for operand in operands]
        return [
            self.cast_impl(each, tl.float32) if bf16 else each
            for each, bf16 in zip(operands, is_bf16, strict=True)
        ]

    InterpreterBuilder.create_dot = lambda self, a, b, *rest: multiply(self, *widened(self, a, b), *rest)


if __name__ == "__main__":
    multiply_bf16_in_interpreter()
    torch.save(run(torch.load(sys.argv[1])), sys.argv[2])
