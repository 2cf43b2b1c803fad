"""The loss of one pass: which targets a run learns from, and how its two terms add up.

Token logits arrive un-mixed (the MixToken box exchanged back), so token targets are never mixed;
the class logits saw both images, so the class target is.

Invariant: what depends on the settings is chosen once, in `build_loss`; a call only computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from horovod_volo.config.schema import Objective
from horovod_volo.core.labels import Labels
from horovod_volo.objective.label_map import Geometry, map_targets, most_probable
from horovod_volo.objective.mixtoken import Mix
from horovod_volo.objective.soft_target import (
    SoftTarget,
    blend,
    cross_entropy,
    cross_entropy_in_place,
    one_hot,
    smoothed,
)


class LossParts(NamedTuple):
    """A pass's loss and its terms before weighting: fp32 scalars on the device."""

    total: Tensor
    class_loss: Tensor
    token_loss: Tensor


class Targets(NamedTuple):
    """What the two heads should answer."""

    classes: SoftTarget  # batch rows, not yet mixed
    tokens: SoftTarget  # batch x tokens rows, row-major


Loss = Callable[[Tensor, Tensor, Labels, Mix], LossParts]


def build_loss(settings: Objective, num_classes: int, tokens_per_side: int) -> Loss:
    """Choose the loss of a run: loss(class_logits, token_logits, labels, box).

    Class logits are (batch, classes), token logits (batch, tokens, classes), already un-mixed.
    """
    if not settings.token_label:
        return ClassLoss(
            lambda labels: one_hot(labels.classes, num_classes, settings.smoothing), settings.cls_weight
        )
    targets: Callable[[Labels], Targets]
    if not settings.token_label_data:
        targets = ClassTargets(num_classes, tokens_per_side, settings.smoothing)
    else:
        teacher = LabelMapTargets(num_classes, tokens_per_side, settings.smoothing, settings.label_geometry)
        targets = LabelMapAndClassTargets(teacher) if settings.ground_truth else teacher
    if not settings.dense_weight:  # the network then has no token logits
        return ClassLoss(lambda labels: targets(labels).classes, settings.cls_weight)
    return TokenLabelLoss(targets, settings.cls_weight, settings.dense_weight)


@dataclass(frozen=True)
class TokenLabelLoss:
    """Cross-entropy of the mixed class target plus that of every token's own target."""

    targets: Callable[[Labels], Targets]
    class_weight: float
    token_weight: float

    def __call__(self, class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Mix) -> LossParts:
        """Return the loss of one pass."""
        targets = self.targets(labels)
        class_loss = cross_entropy(class_logits, _mixed(targets.classes, box)).mean()
        token_loss = cross_entropy_in_place(token_logits.flatten(0, 1), targets.tokens).mean()
        return LossParts(
            self.class_weight * class_loss + self.token_weight * token_loss, class_loss, token_loss
        )


@dataclass(frozen=True)
class ClassLoss:
    """Cross-entropy of the mixed class target alone; token logits are not looked at."""

    target: Callable[[Labels], SoftTarget]
    class_weight: float

    def __call__(self, class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Mix) -> LossParts:  # noqa: ARG002
        """Return the loss of one pass."""
        class_loss = cross_entropy(class_logits, _mixed(self.target(labels), box)).mean()
        return LossParts(self.class_weight * class_loss, class_loss, torch.zeros_like(class_loss))


@dataclass(frozen=True)
class ClassTargets:
    """Targets without a teacher: the image's class, for the image and for each of its tokens."""

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
    """Targets from label maps: the crop's for the image, the cell's for each token."""

    num_classes: int
    tokens_per_side: int
    smoothing: float
    geometry: Geometry

    def __call__(self, labels: Labels) -> Targets:
        """Return the teacher's smoothed opinion."""
        maps = labels.maps
        if maps is None:
            raise ValueError("the loss was built for label maps, but the batch brings none")
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
    """The teacher's targets, with the true class mixed into the image's."""

    teacher: LabelMapTargets

    def __call__(self, labels: Labels) -> Targets:
        """Return the class target blended with the smoothed true class."""
        targets = self.teacher(labels)
        truth = one_hot(labels.classes, self.teacher.num_classes, self.teacher.smoothing)
        # Published as it is: a teacher that agrees with the truth keeps half the say, one that
        # disagrees nine tenths, although one would expect the reverse.
        agrees = most_probable(targets.classes) == labels.classes  # (batch,)
        share = 0.9 - 0.4 * agrees  # (batch,) fp32
        return Targets(blend(targets.classes, truth, share), targets.tokens)


def _mixed(target: SoftTarget, box: Mix) -> SoftTarget:
    return blend(target, target.reversed_batch(), box.lam)
