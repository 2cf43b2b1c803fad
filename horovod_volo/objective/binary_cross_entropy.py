"""Binary cross-entropy (BCE) of logits with sparse soft targets: each class is a question of its own.

With softplus(x) = log(1 + exp x), the loss of class c is softplus(x_c) - t_c x_c. Hence for each row

    loss       = (sum_c softplus(x_c) - uniform x sum_c x_c - sum_e w_e x[id_e]) / classes
    d loss/d x = (sigmoid(x) - uniform - scatter(w)) / classes

Invariant: the loss of a row is the mean over its classes, as in timm and PyTorch.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from horovod_volo.config.task_settings import Objective
from horovod_volo.objective.loss import Loss, SoftTargetLoss, build_targets, register_loss
from horovod_volo.objective.soft_target import SoftTarget, blocks, check_rows, may_overwrite


def binary_cross_entropy(logits: Tensor, target: SoftTarget, threshold: float = 0.0) -> Tensor:
    """Return the BCE of each row, (rows,) fp32, whatever the logits' dtype.

    With a threshold above 0 the target of a class is 1 if it is above it, and otherwise 0.
    """
    return _loss(logits, target, threshold, overwrite=False)


def binary_cross_entropy_in_place(logits: Tensor, target: SoftTarget, threshold: float = 0.0) -> Tensor:
    """Return `binary_cross_entropy`; the gradient overwrites the logits, which must not be read afterwards.

    A leaf, a view of a leaf and logits that need no gradient are not overwritten.
    """
    return _loss(logits, target, threshold, overwrite=may_overwrite(logits))


def _loss(logits: Tensor, target: SoftTarget, threshold: float, *, overwrite: bool) -> Tensor:
    check_rows(logits, target)
    if threshold:
        target = above(target, threshold)
    loss: Tensor = _SparseBinaryCE.apply(  # type: ignore[no-untyped-call]
        logits, target.uniform, target.ids, target.weights, overwrite
    )
    return loss


def above(target: SoftTarget, threshold: float) -> SoftTarget:
    """Return the target that is 1 where this one is above the threshold, and otherwise 0.

    It costs rows x entries x entries: few entries are assumed, as images that are mixed in pairs have.
    """
    same = target.ids.unsqueeze(2) == target.ids.unsqueeze(1)  # (rows, entries, entries)
    total = target.uniform.unsqueeze(1) + (same * target.weights.unsqueeze(1)).sum(dim=2)
    # Of entries with the same id the first counts: no earlier one is equal to it.
    is_first = ~torch.tril(same, diagonal=-1).any(dim=2)
    uniform = (target.uniform > threshold).float()
    return SoftTarget(uniform, target.ids, ((total > threshold).float() - uniform.unsqueeze(1)) * is_first)


class _SparseBinaryCE(Function):
    """The loss per row; with `overwrite`, backward writes the gradient into the logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, uniform: Tensor, ids: Tensor, weights: Tensor, overwrite: bool
    ) -> Tensor:
        # The detached tensor shares the version counter, so autograd detects later changes of the logits.
        numbers = logits.detach().contiguous()
        # The casts are explicit: the result must not depend on an autocast region around the call.
        softplus_sums = torch.cat([softplus(numbers[rows].float()).sum(dim=1) for rows in blocks(numbers)])
        weighted = (weights * numbers.gather(1, ids).float()).sum(dim=1)
        sums = numbers.sum(dim=1, dtype=torch.float32)
        ctx.overwrite = overwrite
        ctx.save_for_backward(numbers, uniform, ids, weights)
        return (softplus_sums - uniform * sums - weighted) / numbers.shape[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None, None, None]:
        numbers, uniform, ids, weights = ctx.saved_tensors
        grad = numbers if ctx.overwrite else torch.empty_like(numbers)
        scale = (grad_loss / numbers.shape[1]).unsqueeze(1)
        for rows in blocks(numbers):
            block = numbers[rows].float().sigmoid().sub_(uniform[rows].unsqueeze(1))
            block.scatter_add_(1, ids[rows], -weights[rows])
            torch.mul(block, scale[rows], out=grad[rows])
        return grad, None, None, None, None


def _build_loss(settings: Objective, num_classes: int, tokens_per_side: int) -> Loss:
    """Build the binary cross-entropy with the targets of the cross-entropy."""
    return SoftTargetLoss(
        build_targets(settings, num_classes, tokens_per_side),
        settings.cls_weight,
        settings.dense_weight,
        partial(binary_cross_entropy, threshold=settings.bce_target_threshold),
        partial(binary_cross_entropy_in_place, threshold=settings.bce_target_threshold),
    )


register_loss("bce", _build_loss)
