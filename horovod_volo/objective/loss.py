"""Losses by name. Given class logits, token logits, labels and the mix of a micro-batch, a loss returns its
terms and their weighted sum, the scalar from which backward starts.

The built-in losses are the cross-entropy, and the binary cross-entropy, with soft targets of the class and
of the tokens. The model swaps tokens back before the token head, so token targets need no mixing. The class
token has seen both images, so its target is mixed. Invariant: what depends on the settings is decided once,
in `build_loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from horovod_volo.config.objective_settings import Objective
from horovod_volo.core.batch import Labels
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import Registry
from horovod_volo.objective.binary_cross_entropy import binary_cross_entropy, binary_cross_entropy_in_place
from horovod_volo.objective.class_weights import ClassWeights
from horovod_volo.objective.label_map import Geometry, map_targets, most_probable
from horovod_volo.objective.mixing import Mix
from horovod_volo.objective.soft_target import (
    SoftTarget,
    blend,
    cross_entropy,
    cross_entropy_in_place,
    one_hot,
    smoothed,
)


class LossParts(NamedTuple):
    """The loss of a micro-batch, and its terms before weighting: fp32 scalars on the device."""

    total: Tensor
    class_loss: Tensor
    token_loss: Tensor


class Targets(NamedTuple):
    """The targets of the two heads."""

    classes: SoftTarget  # batch rows, not yet mixed
    tokens: SoftTarget  # batch x tokens rows, row-major


class RowLosses(NamedTuple):
    """The loss of each row of logits (rows, classes) with its target, for the two heads; fp32."""

    classes: Callable[[Tensor, SoftTarget], Tensor]
    tokens: Callable[[Tensor, SoftTarget], Tensor]  # may overwrite the logits


# (class logits (batch, classes), token logits (batch, tokens, classes) in unmixed order, labels, mix)
Loss = Callable[[Tensor, Tensor, Labels, Mix], LossParts]

# (settings, number of classes, tokens per side) -> Loss
BuildLoss = Callable[[Objective, int, int], Loss]

LOSSES: Registry[BuildLoss] = Registry("loss", "--loss")
register_loss = LOSSES.register


def build_loss(
    settings: Objective, num_classes: int, tokens_per_side: int, class_weights: ClassWeights | None = None
) -> Loss:
    """Build the loss that the settings name; only the built-in one takes weights of classes."""
    if class_weights is not None:
        return _soft_target_loss(settings, num_classes, tokens_per_side, class_weights)
    return LOSSES.find(settings.loss)(settings, num_classes, tokens_per_side)


def _soft_target_loss(
    settings: Objective, num_classes: int, tokens_per_side: int, class_weights: ClassWeights | None = None
) -> Loss:
    """Build the cross-entropy with soft targets of the class and, with token labels, of the tokens."""
    rows = RowLosses(cross_entropy, cross_entropy_in_place)
    return _build(settings, num_classes, tokens_per_side, rows, class_weights)


def _binary_loss(settings: Objective, num_classes: int, tokens_per_side: int) -> Loss:
    """Build the binary cross-entropy with the same targets."""
    threshold = settings.bce_target_threshold
    of_rows = RowLosses(
        partial(binary_cross_entropy, threshold=threshold),
        partial(binary_cross_entropy_in_place, threshold=threshold),
    )
    return _build(settings, num_classes, tokens_per_side, of_rows)


def _build(
    settings: Objective,
    num_classes: int,
    tokens_per_side: int,
    of_rows: RowLosses,
    class_weights: ClassWeights | None = None,
) -> Loss:
    def weighted(target: SoftTarget) -> SoftTarget:
        return target if class_weights is None else class_weights.applied(target, settings.smoothing)

    if not settings.token_label:
        return ClassLoss(
            lambda labels: weighted(one_hot(labels.classes, num_classes, settings.smoothing)),
            settings.cls_weight,
            of_rows,
        )
    targets: Callable[[Labels], Targets]
    if not settings.token_label_data:
        targets = ClassTargets(num_classes, tokens_per_side, settings.smoothing)
    else:
        teacher = LabelMapTargets(num_classes, tokens_per_side, settings.smoothing, settings.label_geometry)
        targets = LabelMapAndClassTargets(teacher) if settings.ground_truth else teacher
    if not settings.dense_weight:  # the model then has no auxiliary head
        return ClassLoss(lambda labels: weighted(targets(labels).classes), settings.cls_weight, of_rows)
    if class_weights is None:
        return TokenLabelLoss(targets, settings.cls_weight, settings.dense_weight, of_rows)
    of_labels = targets
    return TokenLabelLoss(
        lambda labels: Targets(*map(weighted, of_labels(labels))),
        settings.cls_weight,
        settings.dense_weight,
        of_rows,
    )


@dataclass(frozen=True)
class TokenLabelLoss:
    """Loss of the mixed class target, plus the mean loss of the token targets."""

    targets: Callable[[Labels], Targets]
    class_weight: float
    token_weight: float
    of_rows: RowLosses

    def __call__(self, class_logits: Tensor, token_logits: Tensor, labels: Labels, mix: Mix) -> LossParts:
        """Return the loss of one micro-batch."""
        targets = self.targets(labels)
        class_loss = self.of_rows.classes(class_logits, _mixed(targets.classes, mix)).mean()
        token_loss = self.of_rows.tokens(token_logits.flatten(0, 1), targets.tokens).mean()
        return LossParts(
            self.class_weight * class_loss + self.token_weight * token_loss, class_loss, token_loss
        )


@dataclass(frozen=True)
class ClassLoss:
    """Loss of the mixed class target; token logits are ignored."""

    target: Callable[[Labels], SoftTarget]
    class_weight: float
    of_rows: RowLosses

    def __call__(self, class_logits: Tensor, token_logits: Tensor, labels: Labels, mix: Mix) -> LossParts:  # noqa: ARG002
        """Return the loss of one micro-batch."""
        class_loss = self.of_rows.classes(class_logits, _mixed(self.target(labels), mix)).mean()
        return LossParts(self.class_weight * class_loss, class_loss, torch.zeros_like(class_loss))


@dataclass(frozen=True)
class ClassTargets:
    """Targets without label maps: the class of the image, for the image and for each token."""

    num_classes: int
    tokens_per_side: int
    smoothing: float

    def __call__(self, labels: Labels) -> Targets:
        """Return one-hot targets."""
        token_classes = labels.classes.repeat_interleave(self.tokens_per_side**2)  # (batch x tokens,)
        return Targets(
            one_hot(labels.classes, self.num_classes, self.smoothing),
            one_hot(token_classes, self.num_classes, self.smoothing),
        )


@dataclass(frozen=True)
class LabelMapTargets:
    """Targets from label maps: the mean over the crop for the image, over a token's area for the token."""

    num_classes: int
    tokens_per_side: int
    smoothing: float
    geometry: Geometry

    def __call__(self, labels: Labels) -> Targets:
        """Return the smoothed targets of the label maps."""
        maps = labels.maps
        if maps is None:
            raise ValueError("the loss was built for label maps, but the batch has none")
        targets = map_targets(
            maps.scores,
            maps.ids,
            maps.boxes,
            sides=(1, self.tokens_per_side),
            num_classes=self.num_classes,
            geometry=self.geometry,
            reach=maps.reach,
        )
        return Targets(*(smoothed(target, self.num_classes, self.smoothing) for target in targets))


@dataclass(frozen=True)
class LabelMapAndClassTargets:
    """Targets from label maps, with the true class blended into the class target."""

    teacher: LabelMapTargets

    def __call__(self, labels: Labels) -> Targets:
        """Return the class target blended with the smoothed true class, and the token targets."""
        targets = self.teacher(labels)
        truth = one_hot(labels.classes, self.teacher.num_classes, self.teacher.smoothing)
        # As published: the map has weight 0.5 where it agrees with the true class and 0.9 where it does not,
        # although one would expect the reverse.
        agrees = most_probable(targets.classes) == labels.classes  # (batch,)
        weight = 0.9 - 0.4 * agrees  # (batch,) fp32
        return Targets(blend(targets.classes, truth, weight), targets.tokens)


def _mixed(target: SoftTarget, mix: Mix) -> SoftTarget:
    return blend(target, target.reversed_batch(), mix.lam)


def check_threshold(settings: Objective, num_classes: int) -> None:
    """Raise UserError if every class were a target of an image."""
    threshold, of_all = settings.bce_target_threshold, settings.smoothing / num_classes
    if settings.loss == "bce" and 0 < threshold <= of_all:
        raise UserError(
            f"--smoothing {settings.smoothing:g} gives each of {num_classes} classes a target of "
            f"{of_all:.3g}, and --bce-target-threshold {threshold:g} would make it 1. Use a threshold above "
            "it, or --smoothing 0."
        )


register_loss("soft-target", _soft_target_loss)
register_loss("bce", _binary_loss)
