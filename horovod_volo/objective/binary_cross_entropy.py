"""Binary cross-entropy (BCE) of logits with sparse soft targets: each class is a question of its own.

With softplus(x) = log(1 + exp x), the loss of class c is softplus(x_c) - t_c x_c. Hence for each row

    loss       = (sum_c softplus(x_c) - uniform x sum_c x_c - sum_e w_e x[id_e]) / classes
    d loss/d x = (sigmoid(x) - uniform - scatter(w)) / classes

Invariant: the loss of a row is the mean over its classes, as in timm and PyTorch.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import softplus

from horovod_volo.config.task_settings import Objective
from horovod_volo.objective.loss import Loss, register_loss, soft_target_loss
from horovod_volo.objective.soft_target import SoftTarget, blocks, sparse_loss


def binary_cross_entropy(
    logits: Tensor, target: SoftTarget, threshold: float = 0.0, *, overwrite: bool = False
) -> Tensor:
    """Return the BCE of each row, (rows,) fp32, whatever the logits' dtype.

    With a threshold above 0 the target of a class is 1 if it is above it, and otherwise 0. For `overwrite`
    see `sparse_loss`.
    """
    if threshold:
        target = above(target, threshold)
    return sparse_loss(logits, target, (_loss, _write_gradient), overwrite=overwrite)


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


def _loss(logits: Tensor, uniform: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    # The casts are explicit: the result must not depend on an autocast region around the call.
    softplus_sums = torch.cat([softplus(logits[rows].float()).sum(dim=1) for rows in blocks(logits)])
    weighted = (weights * logits.gather(1, ids).float()).sum(dim=1)
    sums = logits.sum(dim=1, dtype=torch.float32)
    return (softplus_sums - uniform * sums - weighted) / logits.shape[1], softplus_sums


def _write_gradient(
    grad: Tensor, logits: Tensor, _: Tensor, grad_loss: Tensor, uniform: Tensor, ids: Tensor, weights: Tensor
) -> None:
    scale = (grad_loss / logits.shape[1]).unsqueeze(1)
    for rows in blocks(logits):
        block = logits[rows].float().sigmoid().sub_(uniform[rows].unsqueeze(1))
        block.scatter_add_(1, ids[rows], -weights[rows])
        torch.mul(block, scale[rows], out=grad[rows])


def _build_loss(settings: Objective, num_classes: int, tokens_per_side: int) -> Loss:
    """Build the binary cross-entropy with the targets of the cross-entropy."""
    row_loss = partial(binary_cross_entropy, threshold=settings.bce_target_threshold)
    return soft_target_loss(row_loss, settings, num_classes, tokens_per_side)


register_loss("bce", _build_loss)
