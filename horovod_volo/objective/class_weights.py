"""Weights of classes in the loss.

The target of an image or of a token is multiplied by the mean weight of the classes under it, before
smoothing: for a class label by the weight of the class, for a label map by the sum over classes of target x
weight. Images are weighted before they are mixed. The mean over the batch is not divided by the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.core.errors import UserError
from horovod_volo.core.names import nearest
from horovod_volo.objective.soft_target import SoftTarget

BALANCED = "balanced"


class ClassWeights:
    """The weight of each class."""

    def __init__(self, weights: Sequence[float]) -> None:
        values = torch.tensor(weights, dtype=torch.float32)
        self._on = cache(values.to)  # one copy to each device

    def applied(self, target: SoftTarget, smoothing: float) -> SoftTarget:
        """Return a target that was smoothed, each row multiplied by its mean weight before smoothing."""
        weights = self._on(target.ids.device)
        # Smoothing adds the same to every class; what is left is in proportion to the target before it.
        uniform = target.uniform - smoothing / len(weights)  # (rows,)
        weighted = uniform * weights.sum() + (target.weights * weights[target.ids]).sum(dim=1)
        factor = weighted / (uniform * len(weights) + target.weights.sum(dim=1))
        return SoftTarget(target.uniform * factor, target.ids, target.weights * factor.unsqueeze(1))


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
