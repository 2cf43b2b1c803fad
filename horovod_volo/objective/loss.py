"""Losses by name. Given class logits, token logits, labels and the mix of a micro-batch, a loss returns its
terms and their weighted sum, the scalar from which backward starts.

The built-in losses are the cross-entropy here, and the binary cross-entropy (binary_cross_entropy.py), with
soft targets of the class and of the tokens. The model swaps tokens back before the token head, so token
targets need no mixing. The class token has seen both images, so its target is mixed. Invariant: what depends
on the settings is decided once, in `build_loss`.

Weights of classes multiply the target of an image or of a token by the mean weight of the classes under it,
before smoothing: for a class label by the weight of the class, for a label map by the sum over classes of
target x weight. Images are weighted before they are mixed. The mean over the batch is not divided by the
weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.task_settings import Objective
from horovod_volo.core.batch import Labels
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import Registry, nearest
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

BALANCED = "balanced"


class LossParts(NamedTuple):
    """The loss of a micro-batch, and its terms before weighting: fp32 scalars on the device."""

    total: Tensor
    class_loss: Tensor
    token_loss: Tensor


class Targets(NamedTuple):
    """The targets of the two heads."""

    classes: SoftTarget  # batch rows, not yet mixed
    tokens: SoftTarget | None = None  # batch x tokens rows, row-major; None: there is no loss of tokens


# (logits (rows, classes), target) -> loss of each row, fp32
RowLoss = Callable[[Tensor, SoftTarget], Tensor]

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
    targets = build_targets(settings, num_classes, tokens_per_side, class_weights)
    return SoftTargetLoss(
        targets, settings.cls_weight, settings.dense_weight, cross_entropy, cross_entropy_in_place
    )


register_loss("soft-target", _soft_target_loss)


@dataclass(frozen=True)
class SoftTargetLoss:
    """Loss of the mixed class target, plus the mean loss of the token targets if there are any."""

    targets: Callable[[Labels], Targets]
    class_weight: float
    token_weight: float
    class_row_loss: RowLoss
    token_row_loss: RowLoss  # may overwrite the logits

    def __call__(self, class_logits: Tensor, token_logits: Tensor, labels: Labels, mix: Mix) -> LossParts:
        """Return the loss of one micro-batch."""
        classes, tokens = self.targets(labels)
        mixed = blend(classes, classes.reversed_batch(), mix.lam)
        class_loss = self.class_row_loss(class_logits, mixed).mean()
        if tokens is None:
            return LossParts(self.class_weight * class_loss, class_loss, torch.zeros_like(class_loss))
        token_loss = self.token_row_loss(token_logits.flatten(0, 1), tokens).mean()
        return LossParts(
            self.class_weight * class_loss + self.token_weight * token_loss, class_loss, token_loss
        )


def build_targets(
    settings: Objective, num_classes: int, tokens_per_side: int, class_weights: ClassWeights | None = None
) -> Callable[[Labels], Targets]:
    """Return the function that makes the targets of labels."""
    # Without a loss of tokens the model has no auxiliary head.
    side = tokens_per_side if settings.token_label and settings.dense_weight else 0
    targets: Callable[[Labels], Targets]
    if settings.token_label and settings.token_label_data:
        geometry, truth = settings.label_geometry, settings.ground_truth
        targets = LabelMapTargets(num_classes, side, settings.smoothing, geometry, ground_truth=truth)
    else:
        targets = partial(_class_targets, num_classes, side, settings.smoothing)
    return targets if class_weights is None else partial(class_weights.weigh, targets, settings.smoothing)


def _class_targets(num_classes: int, tokens_per_side: int, smoothing: float, labels: Labels) -> Targets:
    """Return the class of the image as the target of the image and of each token."""
    targets = Targets(one_hot(labels.classes, num_classes, smoothing))
    if not tokens_per_side:
        return targets
    token_classes = labels.classes.repeat_interleave(tokens_per_side**2)  # (batch x tokens,)
    return targets._replace(tokens=one_hot(token_classes, num_classes, smoothing))


@dataclass(frozen=True)
class LabelMapTargets:
    """Targets from label maps: the mean over the crop for the image, over a token's area for the token."""

    num_classes: int
    tokens_per_side: int  # 0: there is no loss of tokens
    smoothing: float
    geometry: Geometry
    ground_truth: bool = False  # whether to blend the true class into the target of the image

    def __call__(self, labels: Labels) -> Targets:
        """Return the smoothed targets of the label maps."""
        maps = labels.maps
        if maps is None:
            raise ValueError("the loss was built for label maps, but the batch has none")
        targets = map_targets(
            maps.scores,
            maps.ids,
            maps.boxes,
            sides=(1, self.tokens_per_side) if self.tokens_per_side else (1,),
            num_classes=self.num_classes,
            geometry=self.geometry,
            reach=maps.reach,
        )
        classes, *tokens = (smoothed(target, self.num_classes, self.smoothing) for target in targets)
        if self.ground_truth:
            truth = one_hot(labels.classes, self.num_classes, self.smoothing)
            # As published: the map has weight 0.5 where it agrees with the true class and 0.9 where it does
            # not, although one would expect the reverse.
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


class ClassWeights:
    """The weight of each class."""

    def __init__(self, weights: Sequence[float]) -> None:
        values = torch.tensor(weights, dtype=torch.float32)
        self._on = cache(values.to)  # one copy to each device

    def _weighted(self, target: SoftTarget, smoothing: float) -> SoftTarget:
        """Return a target that was smoothed, each row multiplied by its mean weight before smoothing."""
        weights = self._on(target.ids.device)
        # Smoothing adds the same to every class; what is left is in proportion to the target before it.
        uniform = target.uniform - smoothing / len(weights)  # (rows,)
        weighted = uniform * weights.sum() + (target.weights * weights[target.ids]).sum(dim=1)
        factor = weighted / (uniform * len(weights) + target.weights.sum(dim=1))
        return SoftTarget(target.uniform * factor, target.ids, target.weights * factor.unsqueeze(1))

    def weigh(self, targets: Callable[[Labels], Targets], smoothing: float, labels: Labels) -> Targets:
        """Return the weighted targets of labels."""
        classes, tokens = targets(labels)
        weighted = Targets(self._weighted(classes, smoothing))
        return weighted if tokens is None else weighted._replace(tokens=self._weighted(tokens, smoothing))


def read_class_weights(
    setting: str, classes: Sequence[str], targets: NDArray[np.int32]
) -> ClassWeights | None:
    """Return the weights of `--class-weights`, or None without; `targets` are the classes of all images."""
    if not setting:
        return None
    if setting != BALANCED:
        return ClassWeights(_from_file(Path(setting), classes))
    counts = np.bincount(targets, minlength=len(classes))
    present = counts > 0
    # The mean over images is 1.
    weights = np.where(present, len(targets) / (present.sum() * np.maximum(counts, 1)), 1.0)
    return ClassWeights(weights.tolist())


def _from_file(file: Path, classes: Sequence[str]) -> list[float]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"--class-weights {file} cannot be read: {error}. Give balanced, or a file."
        ) from None
    known, weights = set(classes), dict[str, float]()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, _, text = line.strip().rpartition(" ")
        name, where = name.strip(), f"Line {number} of {file}"
        weight = _number(text)
        if weight is None or not name:
            raise UserError(f"{where} is not CLASS WEIGHT, with a weight of at least 0: {line.strip()!r}.")
        if name not in known:
            raise UserError(f"{where} names {name!r}, which is not a class.{nearest(name, classes)}")
        if name in weights:
            raise UserError(f"{where} names {name!r} again. Give each class once.")
        weights[name] = weight
    missing = [name for name in classes if name not in weights]
    if missing:
        raise UserError(f"{file} has no weight of {missing[0]!r}. Add a line for each class.")
    if not any(weights.values()):
        raise UserError(f"All weights in {file} are 0. Give a weight above 0 to a class.")
    return [weights[name] for name in classes]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None
