"""Orthogonalisation of matrices by Newton-Schulz iterations, and the assignment of matrices to ranks.

A matrix U S V' becomes U f(S / |S|) V', where f brings each singular value close to 1 by five steps of
s <- a s + b s^3 + c s^5. All steps are matrix products. Invariant: the assignment is a function of the shapes
and the number of ranks alone, so that all ranks know it without a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Keller Jordan's, of the first description of Muon: steep at 0, so that small singular values rise quickly.
# In return the results are not 1, but between 0.68 and 1.13.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
# Matrices of a smaller norm get smaller results: the norm sums squares, which would vanish in fp32.
_SMALLEST_NORM = 1e-15


class Shape(NamedTuple):
    """A matrix's rows and columns; of a filter: output channels, and inputs of each of them."""

    rows: int
    columns: int

    @property
    def wide(self) -> Shape:
        """Return the shape with the shorter side first, in which a matrix is orthogonalised."""
        return Shape(min(self), max(self))

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return self.rows * self.columns

    @property
    def flops(self) -> int:
        """Return the floating-point operations of the iterations: three products in each."""
        short, long = self.wide
        return STEPS * (4 * short**2 * long + 2 * short**3)


def arithmetic(tensor: Tensor) -> torch.dtype:
    """Return the type in which a tensor is orthogonalised: bf16 on a GPU, the tensor's own on a CPU."""
    return torch.bfloat16 if tensor.device.type == "cuda" else tensor.dtype


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return a batch (count, rows, columns) with rows <= columns, each matrix orthogonalised; 0 stays 0."""
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    matrices = (matrices / norms.clamp(min=_SMALLEST_NORM)).to(arithmetic(matrices))
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(STEPS):
        gram = matrices @ matrices.mT  # (count, rows, rows)
        factor = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        matrices = torch.baddbmm(matrices, factor, matrices, beta=linear)
    return matrices


def assign_matrices(shapes: Sequence[Shape], ranks: int) -> list[list[int]]:
    """Return for each rank the numbers of its matrices, in ascending order.

    The costliest matrix that is left goes to the rank with the least work so far, the first of several.
    """
    work, numbers = [0] * ranks, list[list[int]]([] for _ in range(ranks))
    for number in sorted(range(len(shapes)), key=lambda number: -shapes[number].flops):
        rank = work.index(min(work))
        work[rank] += shapes[number].flops
        numbers[rank].append(number)
    return [sorted(of_rank) for of_rank in numbers]
