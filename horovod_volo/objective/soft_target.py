"""Sparse soft targets, "uniform plus a few classes", and the exact cross-entropy with them.

The target of row r is t[r, c] = uniform[r] + sum of weights[r, e] over the entries e with ids[r, e] == c.
Smoothed one-hot targets, the softmax of label maps and mixtures of both have this form.

Invariant: operations on targets cost rows x entries, never rows x classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horovod_volo.objective.sparse_cross_entropy import InPlaceSparseSoftTargetCE, SparseSoftTargetCE


@dataclass(frozen=True, eq=False)
class SoftTarget:
    """A distribution over classes per row, not normalized; an unused entry has weight 0 and any valid id."""

    uniform: Tensor  # (rows,) fp32
    ids: Tensor  # (rows, entries) int64; equal ids within a row add up
    weights: Tensor  # (rows, entries) fp32

    def reversed_batch(self) -> SoftTarget:
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


def cross_entropy(logits: Tensor, target: SoftTarget) -> Tensor:
    """Return -sum over c of t_c log softmax(logits)_c for each row, (rows,) fp32, whatever the logits' dtype.

    Only the logits get a gradient, in their dtype.
    """
    check_rows(logits, target)
    loss: Tensor = SparseSoftTargetCE.apply(  # type: ignore[no-untyped-call]
        logits, target.uniform, target.ids, target.weights, False
    )
    return loss


def cross_entropy_in_place(logits: Tensor, target: SoftTarget) -> Tensor:
    """Return `cross_entropy`; the gradient overwrites the logits, which must not be read afterwards.

    A leaf, a view of a leaf and logits that need no gradient are not overwritten. If another operation's
    backward needs the logits, or if backward runs twice, autograd raises an error.
    """
    if not may_overwrite(logits):
        return cross_entropy(logits, target)
    check_rows(logits, target)
    sparse = (target.uniform, target.ids, target.weights)
    loss: Tensor
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        loss = InPlaceSparseSoftTargetCE.apply(logits, *sparse)  # type: ignore[no-untyped-call]
    else:
        loss = SparseSoftTargetCE.apply(logits, *sparse, True)  # type: ignore[no-untyped-call]
    return loss


def may_overwrite(logits: Tensor) -> bool:
    """Return whether the gradient of logits may be written over them."""
    owner = logits if logits._base is None else logits._base
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    return needs_gradient and not owner.is_leaf and logits.is_contiguous()


def check_rows(logits: Tensor, target: SoftTarget) -> None:
    """Raise ValueError if the target is of another number of rows."""
    if logits.shape[0] != target.uniform.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits, but {target.uniform.shape[0]} rows of targets")
