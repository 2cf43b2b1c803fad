"""Binary cross-entropy (BCE) of logits with soft targets: each class is a question of its own.

Invariant: the loss of a row is the mean over its classes, as in timm and PyTorch. Targets are made dense: a
rounded target, and the gradient, have a number for each class anyway.
"""

from functools import partial

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from horovod_volo.config.task_settings import Objective
from horovod_volo.objective.loss import Loss, register_loss, soft_target_loss
from horovod_volo.objective.soft_target import SoftTarget


def binary_cross_entropy(
    logits: Tensor,
    target: SoftTarget,
    threshold: float = 0.0,
    *,
    overwrite: bool = False,  # noqa: ARG001
) -> Tensor:
    """Return the BCE of each row, (rows,) fp32, whatever the logits' dtype; logits are never overwritten.

    With a threshold above 0 the target of a class is 1 if it is above it, and otherwise 0.
    """
    logits = logits.float()
    dense = target.uniform.unsqueeze(1).repeat(1, logits.shape[1])  # (rows, classes)
    dense.scatter_add_(1, target.ids, target.weights)
    if threshold:
        dense = (dense > threshold).float()
    return binary_cross_entropy_with_logits(logits, dense, reduction="none").mean(dim=1)


def _build_loss(settings: Objective, num_classes: int, tokens_per_side: int) -> Loss:
    row_loss = partial(binary_cross_entropy, threshold=settings.bce_target_threshold)
    return soft_target_loss(row_loss, settings, num_classes, tokens_per_side)


register_loss("bce", _build_loss)
