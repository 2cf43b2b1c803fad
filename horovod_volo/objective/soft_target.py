"""Sparse soft targets, "uniform plus a few classes", and the exact cross-entropy with them.

The target of row r is t[r, c] = uniform[r] + sum of weights[r, e] over the entries e with ids[r, e] == c.
Smoothed one-hot targets, the softmax of label maps and mixtures of both have this form. With
lse = log sum exp x, log softmax(x)_c = x_c - lse. Hence for each row

    loss       = mass x lse - uniform x sum_c x_c - sum_e w_e x[id_e]
    d loss/d x = mass x softmax(x) - uniform - scatter(w)

Invariants: operations on targets cost rows x entries, never rows x classes. The gradient is the only new
tensor of the logits' size; if the logits may be overwritten, there is none. On a CPU, rows are processed in
blocks that fit the cache.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from horovod_volo.core.operators import kernel_of

_BLOCK = 1 << 20  # numbers in a block of rows: 4 MiB in fp32


@dataclass(frozen=True, eq=False)
class SoftTarget:
    """A distribution over classes per row, not normalized; an unused entry has weight 0 and any valid id."""

    uniform: Tensor  # (rows,) fp32
    ids: Tensor  # (rows, entries) int64; equal ids within a row add up
    weights: Tensor  # (rows, entries) fp32

    def reversed_batch(self) -> "SoftTarget":
        """Return the rows in reverse order: the target of each image's partner."""
        return SoftTarget(self.uniform.flip(0), self.ids.flip(0), self.weights.flip(0))


def one_hot(classes: Tensor, num_classes: int, smoothing: float) -> SoftTarget:
    """Return smoothed one-hot targets: 1 - smoothing for the class, the rest spread over all classes."""
    rows = classes.shape[0]
    return SoftTarget(
        uniform=torch.full((rows,), smoothing / num_classes, device=classes.device),
        ids=classes.long().unsqueeze(1),
        weights=torch.full((rows, 1), 1.0 - smoothing, device=classes.device),
    )


def smoothed(target: SoftTarget, num_classes: int, smoothing: float) -> SoftTarget:
    """Return t x on + off with off = smoothing / classes and on = 1 - smoothing + off.

    These published constants are meant for one-hot targets: a soft target of mass 1 gets mass 1 + off.
    Losses are comparable with published ones only with this formula.
    """
    off = smoothing / num_classes
    on = 1.0 - smoothing + off
    return SoftTarget(target.uniform * on + off, target.ids, target.weights * on)


def joined(targets: Sequence[SoftTarget]) -> SoftTarget:
    """Return the targets concatenated along rows."""
    if len(targets) == 1:
        return targets[0]
    uniform, ids, weights = zip(*((t.uniform, t.ids, t.weights) for t in targets), strict=True)
    return SoftTarget(torch.cat(uniform), torch.cat(ids), torch.cat(weights))


def blend(first: SoftTarget, second: SoftTarget, weight: float | Tensor) -> SoftTarget:
    """Return weight x first + (1 - weight) x second; a tensor (rows,) weighs each row."""
    of_entries = weight.unsqueeze(1) if isinstance(weight, Tensor) else weight
    return SoftTarget(
        uniform=weight * first.uniform + (1.0 - weight) * second.uniform,
        ids=torch.cat([first.ids, second.ids], dim=1),
        weights=torch.cat([of_entries * first.weights, (1.0 - of_entries) * second.weights], dim=1),
    )


def cross_entropy(logits: Tensor, target: SoftTarget, *, overwrite: bool = False) -> Tensor:
    """Return -sum over c of t_c log softmax(logits)_c for each row, (rows,) fp32, whatever the logits' dtype.

    Only the logits get a gradient, in their dtype. With `overwrite`, it overwrites the logits, which must not
    be read afterwards. A leaf, a view of a leaf and logits that need no gradient are not overwritten. If
    another operation's backward needs the logits, or if backward runs twice, autograd raises an error.
    """
    if logits.shape[0] != target.uniform.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits, but {target.uniform.shape[0]} rows of targets")
    owner = logits if logits._base is None else logits._base
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    overwrite = overwrite and needs_gradient and not owner.is_leaf and logits.is_contiguous()
    sparse = (target.uniform, target.ids, target.weights)
    if overwrite and logits.device.type == "cpu" and logits.dtype == torch.float32:
        loss: Tensor = InPlaceSparseSoftTargetCE.apply(logits, *sparse)
    else:
        loss = SparseSoftTargetCE.apply(logits, *sparse, overwrite)
    return loss


class SparseSoftTargetCE(Function):
    """The loss per row; with `overwrite`, backward writes the gradient into the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, uniform: Tensor, ids: Tensor, weights: Tensor, overwrite: bool
    ) -> Tensor:
        # The detached tensor shares the version counter, so autograd detects later changes of the logits.
        numbers = logits.detach().contiguous()
        compute, ctx.write_gradient = kernel_of("loss", logits) or (_loss, _write_gradient)
        loss: Tensor
        loss, lse = compute(numbers, uniform, ids, weights)
        ctx.overwrite = overwrite
        ctx.save_for_backward(numbers, lse, uniform, ids, weights)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        numbers, lse, *target = ctx.saved_tensors
        grad = numbers if ctx.overwrite else torch.empty_like(numbers)
        ctx.write_gradient(grad, numbers, lse, grad_loss, *target)
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
        for rows in _blocks(numbers):
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
        for rows in _blocks(grad):
            grad[rows].mul_(mass[rows]).sub_(shift[rows]).scatter_add_(1, ids[rows], subtracted[rows])
        return grad, None, None, None


def _loss(logits: Tensor, uniform: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's loss and log sum exp."""
    # The casts are explicit: the result must not depend on an autocast region around the call.
    lse = torch.cat([logits[rows].float().logsumexp(dim=1) for rows in _blocks(logits)])  # (rows,)
    weighted = (weights * logits.gather(1, ids).float()).sum(dim=1)
    sums = logits.sum(dim=1, dtype=torch.float32)
    return _mass(logits.shape[1], uniform, weights) * lse - uniform * sums - weighted, lse


def _write_gradient(grad: Tensor, logits: Tensor, lse: Tensor, grad_loss: Tensor, *sparse: Tensor) -> None:
    """Write the gradient into `grad`, which may be the logits."""
    uniform, ids, weights = sparse
    mass = _mass(logits.shape[1], uniform, weights)
    for rows in _blocks(logits):
        # Subtracting the fp32 lse promotes half-precision logits.
        block = (logits[rows] - lse[rows].unsqueeze(1)).exp_()  # (rows of the block, classes) fp32
        block.mul_(mass[rows].unsqueeze(1)).sub_(uniform[rows].unsqueeze(1))
        block.scatter_add_(1, ids[rows], -weights[rows])
        torch.mul(block, grad_loss[rows].unsqueeze(1), out=grad[rows])


def _mass(num_classes: int, uniform: Tensor, weights: Tensor) -> Tensor:
    return uniform * num_classes + weights.sum(dim=1)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Yield slices of rows, each of about _BLOCK numbers."""
    rows, classes = logits.shape
    length = max(1, _BLOCK // classes)
    return (slice(first, first + length) for first in range(0, rows, length))
