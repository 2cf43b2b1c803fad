"""Soft targets as "uniform plus a few classes", and the exact cross-entropy against them.

Row r asks for t[r, c] = uniform[r] + sum of weights[r, e] over the entries e with ids[r, e] == c.
Smoothed one-hots, softmaxed label maps and mixtures of both all have this form.

Invariant: every operation costs rows x entries, never rows x classes; only the logits and their
gradient are that large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, eq=False)
class SoftTarget:
    """A distribution over classes per row, up to its mass; an unused entry has weight 0 and any valid id."""

    uniform: Tensor  # (rows,) fp32
    ids: Tensor  # (rows, entries) int64; equal ids within a row add up
    weights: Tensor  # (rows, entries) fp32

    def mass(self, num_classes: int) -> Tensor:
        """Return the sum of t over all classes, (rows,)."""
        return self.uniform * num_classes + self.weights.sum(dim=1)

    def reversed_batch(self) -> SoftTarget:
        """Return the rows in reverse order: each image's MixToken partner."""
        return SoftTarget(self.uniform.flip(0), self.ids.flip(0), self.weights.flip(0))


def one_hot(classes: Tensor, num_classes: int, smoothing: float) -> SoftTarget:
    """Put 1 - smoothing on each row's class and spread the rest over all classes, itself included."""
    rows = classes.shape[0]
    return SoftTarget(
        uniform=torch.full((rows,), smoothing / num_classes, device=classes.device),
        ids=classes.long().unsqueeze(1),
        weights=torch.full((rows, 1), 1.0 - smoothing, device=classes.device),
    )


def smoothed(target: SoftTarget, num_classes: int, smoothing: float) -> SoftTarget:
    """Return t x on + off with off = smoothing / classes and on = 1 - smoothing + off.

    These are the published constants, made for 0-or-1 targets: a target of mass 1 leaves with
    mass 1 + off. Losses stay comparable with the published ones only as long as this is kept.
    """
    off = smoothing / num_classes
    on = 1.0 - smoothing + off
    return SoftTarget(target.uniform * on + off, target.ids, target.weights * on)


def blend(first: SoftTarget, second: SoftTarget, share: float | Tensor) -> SoftTarget:
    """Return share x first + (1 - share) x second; a tensor gives every row its own share."""
    entry_share = share.unsqueeze(1) if isinstance(share, Tensor) else share
    return SoftTarget(
        uniform=share * first.uniform + (1.0 - share) * second.uniform,
        ids=torch.cat([first.ids, second.ids], dim=1),
        weights=torch.cat([entry_share * first.weights, (1.0 - entry_share) * second.weights], dim=1),
    )


def cross_entropy(logits: Tensor, target: SoftTarget) -> Tensor:
    """Return -sum over c of t_c log softmax(logits)_c for each row, (rows,) fp32, whatever the logits' dtype.

    The gradient reaches the logits alone, in their dtype.
    """
    if logits.shape[0] != target.uniform.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits meet {target.uniform.shape[0]} rows of targets")
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, target.uniform, target.ids, target.weights
    )
    return loss


class _CrossEntropy(Function):
    """Cross-entropy with its gradient by hand, so that only the logits themselves are kept for backward.

    With lse = log sum exp x, log softmax(x)_c = x_c - lse. Hence for each row

        loss       = uniform x (classes x lse - sum_c x_c) + sum_e w_e (lse - x[id_e])
        d loss/d x = mass x softmax(x) - uniform - scatter(w)
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, uniform: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        # The casts are explicit: the result must not depend on an autocast region around the call.
        lse = logits.float().logsumexp(dim=1)  # (rows,)
        ctx.save_for_backward(logits, lse, uniform, ids, weights)
        spread = logits.shape[1] * lse - logits.sum(dim=1, dtype=torch.float32)
        surprise = lse.unsqueeze(1) - logits.gather(1, ids).float()  # (rows, entries)
        return uniform * spread + (weights * surprise).sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None]:
        logits, lse, uniform, ids, weights = ctx.saved_tensors
        target = SoftTarget(uniform, ids, weights)
        # Subtracting the fp32 lse promotes half-precision logits without a copy of them;
        # everything after it is in place, for this is the largest tensor of the loss.
        grad = (logits - lse.unsqueeze(1)).exp_()  # (rows, classes) fp32
        grad.mul_(target.mass(logits.shape[1]).unsqueeze(1)).sub_(uniform.unsqueeze(1))
        grad.scatter_add_(1, ids, -weights)
        grad.mul_(grad_loss.unsqueeze(1))
        return grad.to(logits.dtype), None, None, None
