"""Losses by name. Given class logits, token logits, labels and the mix of a micro-batch, a loss returns its
terms and their weighted sum, the scalar from which backward starts.

The built-in losses are the cross-entropy and the binary cross-entropy (BCE), with soft targets of the class
and of the tokens. The model swaps tokens back before the token head, so token targets need no mixing. The
class token has seen both images, so its target is mixed. Invariant: what depends on the settings is decided
once, in `build_loss`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from horovod_volo.config.task_settings import Objective
from horovod_volo.core.batch import Labels
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import Registry
from horovod_volo.objective.label_map import Geometry, map_targets, most_probable
from horovod_volo.objective.mixing import Mix
from horovod_volo.objective.soft_target import SoftTarget, blend, cross_entropy, one_hot, smoothed


class LossParts(NamedTuple):
    """The loss of a micro-batch, and its terms before weighting: fp32 scalars on the device."""

    total: Tensor
    class_loss: Tensor
    token_loss: Tensor


class Targets(NamedTuple):
    classes: SoftTarget  # batch rows, not yet mixed
    tokens: SoftTarget | None = None  # batch x tokens rows, row-major; None: there is no loss of tokens


# (logits (rows, classes), target, whether to overwrite the logits by their gradient) -> loss of each row
RowLoss = Callable[..., Tensor]

# (class logits (batch, classes), token logits (batch, tokens, classes) in unmixed order, labels, mix)
Loss = Callable[[Tensor, Tensor, Labels, Mix], LossParts]

# (settings, number of classes, tokens per side) -> Loss
BuildLoss = Callable[[Objective, int, int], Loss]

LOSSES: Registry[BuildLoss] = Registry("loss", "--loss")
register_loss = LOSSES.register


def build_loss(settings: Objective, num_classes: int, tokens_per_side: int) -> Loss:
    """Build the loss that the settings name."""
    return LOSSES.find(settings.loss)(settings, num_classes, tokens_per_side)


@dataclass(frozen=True)
class SoftTargetLoss:
    """Loss of the mixed class target, plus the mean loss of the token targets if there are any."""

    targets: Callable[[Labels], Targets]
    class_weight: float
    token_weight: float
    row_loss: RowLoss

    def __call__(self, class_logits: Tensor, token_logits: Tensor, labels: Labels, mix: Mix) -> LossParts:
        classes, tokens = self.targets(labels)
        mixed = blend(classes, classes.reversed_batch(), mix.lam)
        class_loss = self.row_loss(class_logits, mixed).mean()
        if tokens is None:
            return LossParts(self.class_weight * class_loss, class_loss, torch.zeros_like(class_loss))
        token_loss = self.row_loss(token_logits.flatten(0, 1), tokens, overwrite=True).mean()
        total = self.class_weight * class_loss + self.token_weight * token_loss
        return LossParts(total, class_loss, token_loss)


def soft_target_loss(
    row_loss: RowLoss, settings: Objective, num_classes: int, tokens_per_side: int
) -> SoftTargetLoss:
    """Build a loss with soft targets of the class and, with token labels, of the tokens."""
    # Without a loss of tokens the model has no auxiliary head.
    side = tokens_per_side if settings.token_label and settings.dense_weight else 0
    targets: Callable[[Labels], Targets] = partial(_class_targets, num_classes, side, settings.smoothing)
    if settings.token_label and settings.token_label_data:
        geometry, truth = settings.label_geometry, settings.ground_truth
        targets = partial(label_map_targets, num_classes, side, settings.smoothing, geometry, truth)
    return SoftTargetLoss(targets, settings.cls_weight, settings.dense_weight, row_loss)


def binary_cross_entropy(
    logits: Tensor,
    target: SoftTarget,
    threshold: float = 0.0,
    *,
    overwrite: bool = False,  # noqa: ARG001
) -> Tensor:
    """Return the BCE of each row, (rows,) fp32, whatever the logits' dtype; logits are never overwritten.

    It is the mean over classes, as in timm and PyTorch. With a threshold above 0 the target of a class is 1
    if it is above it, and otherwise 0. Targets are made dense: a rounded target, and the gradient, have a
    number for each class anyway.
    """
    logits = logits.float()
    dense = target.uniform.unsqueeze(1).repeat(1, logits.shape[1])  # (rows, classes)
    dense.scatter_add_(1, target.ids, target.weights)
    if threshold:
        dense = (dense > threshold).float()
    return binary_cross_entropy_with_logits(logits, dense, reduction="none").mean(dim=1)


def _bce_loss(settings: Objective, num_classes: int, tokens_per_side: int) -> Loss:
    row_loss = partial(binary_cross_entropy, threshold=settings.bce_target_threshold)
    return soft_target_loss(row_loss, settings, num_classes, tokens_per_side)


register_loss("soft-target", partial(soft_target_loss, cross_entropy))
register_loss("bce", _bce_loss)


def _class_targets(num_classes: int, tokens_per_side: int, smoothing: float, labels: Labels) -> Targets:
    """Return the class of the image as the target of the image and of each token."""
    targets = Targets(one_hot(labels.classes, num_classes, smoothing))
    if not tokens_per_side:
        return targets
    token_classes = labels.classes.repeat_interleave(tokens_per_side**2)  # (batch x tokens,)
    return targets._replace(tokens=one_hot(token_classes, num_classes, smoothing))


def label_map_targets(
    num_classes: int,
    tokens_per_side: int,
    smoothing: float,
    geometry: Geometry,
    ground_truth: bool,
    labels: Labels,
) -> Targets:
    """Return smoothed means of label maps: over the crop for the image, over a token's area for the token.

    Without `tokens_per_side` there are none of tokens; `ground_truth` blends in the class of the image.
    """
    maps = labels.maps
    assert maps is not None
    targets = map_targets(
        maps.scores,
        maps.ids,
        maps.boxes,
        sides=(1, tokens_per_side) if tokens_per_side else (1,),
        num_classes=num_classes,
        geometry=geometry,
        reach=maps.reach,
    )
    classes, *tokens = (smoothed(target, num_classes, smoothing) for target in targets)
    if ground_truth:
        truth = one_hot(labels.classes, num_classes, smoothing)
        # As published: the map has weight 0.5 where it agrees with the true class and 0.9 where it does not,
        # although one would expect the reverse.
        agrees = most_probable(classes) == labels.classes  # (batch,)
        classes = blend(classes, truth, 0.9 - 0.4 * agrees)  # weights (batch,) fp32
    return Targets(classes, *tokens)


def check_threshold(settings: Objective, num_classes: int) -> None:
    """Raise UserError if every class were a target of an image."""
    threshold, of_all = settings.bce_target_threshold, settings.smoothing / num_classes
    if settings.loss == "bce" and 0 < threshold <= of_all:
        raise UserError(
            f"--smoothing {settings.smoothing:g} gives each of {num_classes} classes a target of "
            f"{of_all:.3g}, and --bce-target-threshold {threshold:g} would make it 1. Use a threshold above "
            "it, or --smoothing 0."
        )
