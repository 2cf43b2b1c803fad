"""Draws the operations of AutoAugment and 3-Augment for each image.

A policy is a list of sub-policies, of which each image gets one: up to two operations, each with a
probability and a magnitude of its own. The policies and their names are timm's: those of the AutoAugment
paper (`original`) and of TensorFlow's EfficientNet (`v0`), both also with the research variant of posterize,
which keeps fewer bits at a higher magnitude (`originalr`, `v0r`), and that of DeiT III (`3a`).

Invariant: draws are pure functions of (seed, epoch, sample index), and the order of a policy's sub-policies
never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.rng import Purpose, uniforms_of_samples
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.operations import Operation
from horovod_volo.data.augmentation.rand_augment import Operations, interpolations, levels, signs

Floats = NDArray[np.float64]
THREE_AUGMENT = "3a"
_DRAWS_OF_LAYER = 6
_BLUR_RADIUS = (0.1, 2.0)  # pixels


class PolicyStep(NamedTuple):
    """One operation of a sub-policy, by the name that timm gives it."""

    name: str
    probability: float
    magnitude: float


@dataclass(frozen=True)
class AutoAugment:
    """A policy such as original-mstd0.5."""

    name: str
    magnitude_std: float = 0.0

    @property
    def sub_policies(self) -> tuple[tuple[PolicyStep, ...], ...]:
        """Return the sub-policies, which are equally probable."""
        return POLICIES[self.name]


def _sub_policies(text: str) -> tuple[tuple[PolicyStep, ...], ...]:
    """Read sub-policies such as "Color 0.4 9, Equalize 0.6 3; Rotate 1 7"."""
    pairs = [[step.split() for step in pair.split(",")] for pair in text.split(";")]
    return tuple(tuple(PolicyStep(name, float(p), float(m)) for name, p, m in pair) for pair in pairs)


_V0 = """
    Equalize 0.8 1, ShearY 0.8 4; Color 0.4 9, Equalize 0.6 3; Color 0.4 1, Rotate 0.6 8;
    Solarize 0.8 3, Equalize 0.4 7; Solarize 0.4 2, Solarize 0.6 2; Color 0.2 0, Equalize 0.8 8;
    Equalize 0.4 8, SolarizeAdd 0.8 3; ShearX 0.2 9, Rotate 0.6 8; Color 0.6 1, Equalize 1.0 2;
    Invert 0.4 9, Rotate 0.6 0; Equalize 1.0 9, ShearY 0.6 3; Color 0.4 7, Equalize 0.6 0;
    Posterize 0.4 6, AutoContrast 0.4 7; Solarize 0.6 8, Color 0.6 9; Solarize 0.2 4, Rotate 0.8 9;
    Rotate 1.0 7, TranslateYRel 0.8 9; ShearX 0.0 0, Solarize 0.8 4; ShearY 0.8 0, Color 0.6 4;
    Color 1.0 0, Rotate 0.6 2; Equalize 0.8 4, Equalize 0.0 8; Equalize 1.0 4, AutoContrast 0.6 2;
    ShearY 0.4 7, SolarizeAdd 0.6 7; Posterize 0.8 2, Solarize 0.6 10; Solarize 0.6 8, Equalize 0.6 1;
    Color 0.8 6, Rotate 0.4 5
"""
_ORIGINAL = """
    PosterizeOriginal 0.4 8, Rotate 0.6 9; Solarize 0.6 5, AutoContrast 0.6 5;
    Equalize 0.8 8, Equalize 0.6 3; PosterizeOriginal 0.6 7, PosterizeOriginal 0.6 6;
    Equalize 0.4 7, Solarize 0.2 4; Equalize 0.4 4, Rotate 0.8 8; Solarize 0.6 3, Equalize 0.6 7;
    PosterizeOriginal 0.8 5, Equalize 1.0 2; Rotate 0.2 3, Solarize 0.6 8;
    Equalize 0.6 8, PosterizeOriginal 0.4 6; Rotate 0.8 8, Color 0.4 0; Rotate 0.4 9, Equalize 0.6 2;
    Equalize 0.0 7, Equalize 0.8 8; Invert 0.6 4, Equalize 1.0 8; Color 0.6 4, Contrast 1.0 8;
    Rotate 0.8 8, Color 1.0 2; Color 0.8 8, Solarize 0.8 7; Sharpness 0.4 7, Invert 0.6 8;
    ShearX 0.6 5, Equalize 1.0 9; Color 0.4 0, Equalize 0.6 3; Equalize 0.4 7, Solarize 0.2 4;
    Solarize 0.6 5, AutoContrast 0.6 5; Invert 0.6 4, Equalize 1.0 8; Color 0.6 4, Contrast 1.0 8;
    Equalize 0.8 8, Equalize 0.6 3
"""
POLICIES = {
    "original": _sub_policies(_ORIGINAL),
    "originalr": _sub_policies(_ORIGINAL.replace("PosterizeOriginal", "PosterizeIncreasing")),
    "v0": _sub_policies(_V0),
    "v0r": _sub_policies(_V0.replace("Posterize", "PosterizeIncreasing")),
    THREE_AUGMENT: _sub_policies("Solarize 1 5; Desaturate 1 10; GaussianBlurRand 1 10"),
}

# The argument of an operation, given its level from 0 to 1 and a uniform number for what it draws.
_Argument = Callable[[Floats, Floats], Floats]


def _usual(operation: Operation, *, increasing: bool = False) -> tuple[Operation, _Argument]:
    return operation, lambda level, draw: operation.argument(level, signs(draw), increasing)


def _bits_of_paper(level: Floats, draw: Floats) -> Floats:  # noqa: ARG001
    return 4 + np.floor(4 * level)


def _factor_of_gray(level: Floats, draw: Floats) -> Floats:  # noqa: ARG001
    return 0.5 - 0.5 * level.clip(0, 1)


def _blur_radius(level: Floats, draw: Floats) -> Floats:
    smallest, largest = _BLUR_RADIUS
    return smallest + (largest * level.clip(0, 1) - smallest) * draw


_NAMED: dict[str, tuple[Operation, _Argument]] = {
    **{operation.name: _usual(operation) for operation in ops.RAND_V1},
    "PosterizeIncreasing": _usual(ops.POSTERIZE, increasing=True),
    "PosterizeOriginal": (ops.POSTERIZE, _bits_of_paper),
    "Desaturate": (ops.COLOR, _factor_of_gray),
    "GaussianBlurRand": (ops.GAUSSIAN_BLUR, _blur_radius),
}


def draw_auto_augment(
    seed: int, epoch: int, indices: NDArray[np.int64], policy: AutoAugment, interpolation: str
) -> Operations:
    """Draw a sub-policy for each image, and which of its operations are applied and how."""
    layers = max(map(len, policy.sub_policies))
    draws = uniforms_of_samples(1 + layers * _DRAWS_OF_LAYER, Purpose.AUTO_AUGMENT, seed, epoch, indices)
    chosen = np.floor(draws[:, 0] * len(policy.sub_policies)).astype(np.int64)  # (batch,)
    applied, angle, radius, draw, filtering, _ = (
        draws[:, 1:].reshape(len(indices), layers, -1).transpose(2, 0, 1)
    )
    kinds = np.full((len(indices), layers), int(ops.NONE), dtype=np.int64)
    arguments = np.zeros(kinds.shape)
    for number, steps in enumerate(policy.sub_policies):
        rows = np.flatnonzero(chosen == number)
        for layer, step in enumerate(steps):
            operation, argument = _NAMED[step.name]
            level = levels(step.magnitude, policy.magnitude_std, angle[rows, layer], radius[rows, layer])
            kinds[rows, layer] = np.where(applied[rows, layer] < step.probability, operation, ops.NONE)
            arguments[rows, layer] = argument(level, draw[rows, layer])
    # Magnitude 0 moves nothing. Pillow returns such an image as it is; resampling it would round.
    kinds[np.isin(kinds, ops.GEOMETRIC) & (arguments == 0)] = ops.NONE
    return Operations(kinds, arguments.astype(np.float32), interpolations(filtering, interpolation))
