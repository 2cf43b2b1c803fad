"""Cross-entropy of logits with sparse soft targets, as autograd functions with an explicit gradient.

With lse = log sum exp x, log softmax(x)_c = x_c - lse. Hence for each row

    loss       = mass x lse - uniform x sum_c x_c - sum_e w_e x[id_e]
    d loss/d x = mass x softmax(x) - uniform - scatter(w)

Invariant: the gradient is the only new tensor of the logits' size; if the logits may be overwritten, there is
none. On a CPU, rows are processed in blocks that fit the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from horovod_volo.core.operators import kernel_of

_BLOCK = 1 << 20  # numbers in a block of rows: 4 MiB in fp32


class SparseSoftTargetCE(Function):
    """The loss per row; with `overwrite`, backward writes the gradient into the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, uniform: Tensor, ids: Tensor, weights: Tensor, overwrite: bool
    ) -> Tensor:
        # The detached tensor shares the version counter, so autograd detects later changes of the logits.
        numbers = logits.detach().contiguous()
        target = (uniform, ids, weights)
        compute, _ = kernel_of("loss", numbers) or (_loss, _write_gradient)
        loss, lse = compute(numbers, *target)
        ctx.overwrite = overwrite
        ctx.save_for_backward(numbers, lse, *target)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        numbers, lse, *target = ctx.saved_tensors
        grad = numbers if ctx.overwrite else torch.empty_like(numbers)
        _, write = kernel_of("loss", numbers) or (_loss, _write_gradient)
        write(grad, numbers, lse, grad_loss, *target)
        return grad, None, None, None, None


class InPlaceSparseSoftTargetCE(Function):
    """The loss per row; forward overwrites contiguous fp32 logits by their softmax, backward by the gradient.

    Forward and backward thus share one softmax. A second backward, or another operation's backward that needs
    the logits, is an error: the version counter has changed.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, uniform: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        numbers = logits.detach()
        mass = _mass(numbers.shape[1], uniform, weights)
        loss = torch.empty_like(uniform)
        for rows in blocks(numbers):
            block = numbers[rows]
            weighted = (weights[rows] * block.gather(1, ids[rows])).sum(dim=1)
            unweighted = uniform[rows] * block.sum(dim=1)
            lse = block.amax(dim=1)
            torch.softmax(block, dim=1, out=block)
            lse -= block.amax(dim=1).log_()  # the largest softmax is 1 / sum exp(x - max)
            torch.sub(lse.mul_(mass[rows]), weighted.add_(unweighted), out=loss[rows])
        ctx.save_for_backward(numbers, mass, uniform, ids, weights)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        grad, mass, uniform, ids, weights = ctx.saved_tensors
        mass, shift = (mass * grad_loss).unsqueeze(1), (uniform * grad_loss).unsqueeze(1)
        subtracted = weights * -grad_loss.unsqueeze(1)
        for rows in blocks(grad):
            grad[rows].mul_(mass[rows]).sub_(shift[rows]).scatter_add_(1, ids[rows], subtracted[rows])
        return grad, None, None, None


def _loss(logits: Tensor, uniform: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's loss and log sum exp."""
    # The casts are explicit: the result must not depend on an autocast region around the call.
    lse = torch.cat([logits[rows].float().logsumexp(dim=1) for rows in blocks(logits)])  # (rows,)
    weighted = (weights * logits.gather(1, ids).float()).sum(dim=1)
    sums = logits.sum(dim=1, dtype=torch.float32)
    return _mass(logits.shape[1], uniform, weights) * lse - uniform * sums - weighted, lse


def _write_gradient(
    grad: Tensor,
    logits: Tensor,
    lse: Tensor,
    grad_loss: Tensor,
    uniform: Tensor,
    ids: Tensor,
    weights: Tensor,
) -> None:
    """Write the gradient into `grad`, which may be the logits."""
    mass = _mass(logits.shape[1], uniform, weights)
    for rows in blocks(logits):
        # Subtracting the fp32 lse promotes half-precision logits.
        block = (logits[rows] - lse[rows].unsqueeze(1)).exp_()  # (rows of the block, classes) fp32
        block.mul_(mass[rows].unsqueeze(1)).sub_(uniform[rows].unsqueeze(1))
        block.scatter_add_(1, ids[rows], -weights[rows])
        torch.mul(block, grad_loss[rows].unsqueeze(1), out=grad[rows])


def _mass(num_classes: int, uniform: Tensor, weights: Tensor) -> Tensor:
    return uniform * num_classes + weights.sum(dim=1)


def blocks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of rows, each of about _BLOCK numbers."""
    rows, classes = logits.shape
    length = max(1, _BLOCK // classes)
    return (slice(first, first + length) for first in range(0, rows, length))
