"""Draws the operations of RandAugment, or of color jitter, and their arguments for each image.

The syntax of `--aa`, the operations and their magnitudes are timm's, so that published settings mean the same
here. Draws are pure functions of (seed, epoch, sample index).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import UserError
from horovod_volo.core.rng import Purpose, uniforms_of_samples
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.operations import RAND_AUGMENT_SETS, RAND_V1, Operation

DRAWS_PER_LAYER = 6
HIGHEST_LEVEL = 10.0
UNIFORM_FROM_MSTD = 100.0  # a larger mstd means a uniform magnitude up to m, as in timm


@dataclass(frozen=True)
class RandAugment:
    """The parameters of a policy such as rand-m9-mstd0.5-inc1."""

    choices: Sequence[Operation] = RAND_V1
    magnitude: float = 10.0
    layers: int = 2
    probability: float = 0.5
    magnitude_std: float = 0.0
    max_magnitude: float = HIGHEST_LEVEL
    increasing: bool = False


@dataclass(frozen=True, eq=False)
class Operations:
    """The operations drawn for a batch, in the order of application."""

    kinds: NDArray[np.int64]  # (batch, layers) numbers of operations, or NONE
    arguments: NDArray[np.float32]  # (batch, layers)
    bicubic: NDArray[np.bool_]  # (batch, layers) interpolation of a geometric operation; else bilinear

    @property
    def geometric(self) -> NDArray[np.bool_]:
        """Return which images have a geometric operation, (batch,)."""
        return np.asarray(np.isin(self.kinds, ops.GEOMETRIC).any(axis=1))

    def of(self, position: int) -> Operations:
        """Return those of one image of the batch."""
        one = slice(position, position + 1)
        return Operations(self.kinds[one], self.arguments[one], self.bicubic[one])


def parse(policy: str) -> RandAugment:
    """Parse timm's syntax; raise UserError where it is not understood."""
    first, *rest = policy.split("-")
    if first not in RAND_AUGMENT_SETS:
        raise UserError(f"--aa {policy} is not known. Write RandAugment as rand-m9-mstd0.5-inc1.")
    parsed = RandAugment(RAND_AUGMENT_SETS[first])
    for part in rest:
        match = re.fullmatch(r"(mstd|mmax|inc|m|n|p)(\d+(?:\.\d+)?)", part)
        if match is None:
            raise UserError(
                f"--aa {policy}: {part!r} is not known. Known are m, n, p, mstd, mmax and inc with a "
                "number each, as in rand-m9-n2-p0.5-mstd0.5-inc1."
            )
        parsed = _with(parsed, match[1], float(match[2]))
    return parsed


def _with(parsed: RandAugment, key: str, value: float) -> RandAugment:
    match key:
        case "m":
            return replace(parsed, magnitude=value)
        case "n":
            return replace(parsed, layers=int(value))
        case "p":
            return replace(parsed, probability=value)
        case "mstd":
            return replace(parsed, magnitude_std=value)
        case "mmax":
            return replace(parsed, max_magnitude=value or HIGHEST_LEVEL)
        case _:
            return replace(parsed, increasing=bool(value))


def draw_operations(seed: int, epoch: int, indices: NDArray[np.int64], settings: Data) -> Operations:
    """Draw the operations of each image."""
    if settings.aa:
        return draw_rand_augment(seed, epoch, indices, parse(settings.aa), settings.train_interpolation)
    if settings.color_jitter:
        return _draw_color_jitter(seed, epoch, indices, settings.color_jitter)
    nothing = np.zeros((len(indices), 0))
    return Operations(nothing.astype(np.int64), nothing.astype(np.float32), nothing.astype(np.bool_))


def draw_rand_augment(
    seed: int,
    epoch: int,
    indices: NDArray[np.int64],
    policy: RandAugment,
    interpolation: str,
) -> Operations:
    """Draw `policy.layers` operations for each image, each one of `policy.choices` or NONE."""
    choices = policy.choices
    draws = uniforms_of_samples(policy.layers * DRAWS_PER_LAYER, Purpose.RAND_AUGMENT, seed, epoch, indices)
    chosen, applied, angle, radius, sign, filtering = draws.reshape(
        len(indices), policy.layers, DRAWS_PER_LAYER
    ).transpose(2, 0, 1)  # (batch, layers) each
    kinds = np.array(choices, dtype=np.int64)[np.floor(chosen * len(choices)).astype(np.int64)]
    if policy.magnitude_std > UNIFORM_FROM_MSTD:
        magnitude = policy.magnitude * radius
    else:  # Box-Muller: a normal number from two uniform ones
        normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * math.pi * angle)
        magnitude = policy.magnitude + policy.magnitude_std * normal
    level = magnitude.clip(0, policy.max_magnitude) / HIGHEST_LEVEL
    signs = np.where(sign < 0.5, -1.0, 1.0)
    arguments = np.select(
        [kinds == choice for choice in choices],
        [choice.argument(level, signs, policy.increasing) for choice in choices],
    )
    kinds = np.where(applied < policy.probability, kinds, ops.NONE)
    always = np.full(kinds.shape, interpolation == "bicubic")
    bicubic = filtering < 0.5 if interpolation == "random" else always
    return Operations(kinds, arguments.astype(np.float32), bicubic)


def _draw_color_jitter(seed: int, epoch: int, indices: NDArray[np.int64], strength: float) -> Operations:
    """Draw factors for brightness, contrast and saturation, and their order."""
    draws = uniforms_of_samples(6, Purpose.COLOR_JITTER, seed, epoch, indices)  # (batch, 6)
    order = draws[:, :3].argsort(axis=1)
    kinds = np.array([ops.BRIGHTNESS, ops.CONTRAST, ops.COLOR], dtype=np.int64)[order]  # (batch, 3)
    low, high = max(0.0, 1 - strength), 1 + strength
    factors = low + (high - low) * draws[:, 3:]
    return Operations(kinds, factors.astype(np.float32), np.zeros(kinds.shape, dtype=np.bool_))
