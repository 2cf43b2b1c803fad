"""Draws the operations of RandAugment and their arguments for each image.

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

from horovod_volo.core.errors import UserError
from horovod_volo.core.rng import Purpose, uniforms_of_samples
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.operations import RAND_AUGMENT_SETS, RAND_V1, Floats, Operation

DRAWS_PER_LAYER = 6
HIGHEST_LEVEL = 10.0
UNIFORM_FROM_MSTD = 100.0  # a larger mstd means a uniform magnitude up to m, as in timm
UNIFORM = math.inf


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
class Mixing:
    """How the results of chains of operations are mixed with each other, and then with the image."""

    weights: NDArray[np.float32]  # (batch, chains), of sum 1
    shares: NDArray[np.float32]  # (batch,) of the mixture; the rest is the image's


@dataclass(frozen=True, eq=False)
class Operations:
    """The operations drawn for a batch, in the order of application.

    With `mixing` they are those of chains of equal length, each of which starts from the image.
    """

    kinds: NDArray[np.int64]  # (batch, layers) numbers of operations, or NONE
    arguments: NDArray[np.float32]  # (batch, layers)
    bicubic: NDArray[np.bool_]  # (batch, layers) interpolation of a geometric operation; else bilinear
    mixing: Mixing | None = None

    @property
    def geometric(self) -> NDArray[np.bool_]:
        """Return which images have a geometric operation, (batch,)."""
        return np.asarray(np.isin(self.kinds, ops.GEOMETRIC).any(axis=1))

    def of(self, rows: slice) -> Operations:
        """Return those of some images of the batch."""
        mixing = self.mixing and Mixing(self.mixing.weights[rows], self.mixing.shares[rows])
        return Operations(self.kinds[rows], self.arguments[rows], self.bicubic[rows], mixing)

    def chains(self) -> list[Operations]:
        """Return those of each chain, of operations with `mixing`."""
        assert self.mixing is not None
        count = self.mixing.weights.shape[1]
        parts = [np.split(each, count, axis=1) for each in (self.kinds, self.arguments, self.bicubic)]
        return [Operations(*chain) for chain in zip(*parts, strict=True)]

    def followed_by(self, others: Operations) -> Operations:
        """Return these operations, and then the others."""
        return Operations(
            np.concatenate([self.kinds, others.kinds], axis=1),
            np.concatenate([self.arguments, others.arguments], axis=1),
            np.concatenate([self.bicubic, others.bicubic], axis=1),
        )


def parse(policy: str) -> RandAugment:
    """Parse timm's syntax; raise UserError where it is not understood."""
    first, *rest = policy.split("-")
    if first not in RAND_AUGMENT_SETS:
        raise UserError(
            f"--aa {policy} is not known. Write RandAugment as rand-m9-mstd0.5-inc1, AutoAugment as "
            "original, originalr, v0 or v0r, 3-Augment as 3a, or AugMix as augmix-m3-w3."
        )
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
    deviation = UNIFORM if policy.magnitude_std > UNIFORM_FROM_MSTD else policy.magnitude_std
    level = levels(policy.magnitude, deviation, angle, radius, policy.max_magnitude)
    arguments = select_arguments(choices, kinds, level, signs(sign), increasing=policy.increasing)
    kinds = np.where(applied < policy.probability, kinds, ops.NONE)
    return Operations(kinds, arguments.astype(np.float32), interpolations(filtering, interpolation))


def levels(
    magnitude: float, std: float, angle: Floats, radius: Floats, largest: float = HIGHEST_LEVEL
) -> Floats:
    """Return levels from two uniform numbers: normal about the magnitude; with UNIFORM uniform up to it."""
    if std == UNIFORM:
        drawn = magnitude * radius
    else:  # Box-Muller: a normal number from two uniform ones
        normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * math.pi * angle)
        drawn = magnitude + std * normal
    return drawn.clip(0, largest) / HIGHEST_LEVEL


def signs(draws: Floats) -> Floats:
    """Return -1 or 1 for each uniform number."""
    return np.where(draws < 0.5, -1.0, 1.0)


def select_arguments(
    choices: Sequence[Operation], kinds: NDArray[np.int64], level: Floats, sign: Floats, *, increasing: bool
) -> Floats:
    """Return the argument of each operation, one of the choices, at its level."""
    return np.select(
        [kinds == choice for choice in choices],
        [choice.argument(level, sign, increasing) for choice in choices],
    )


def interpolations(draws: Floats, interpolation: str) -> NDArray[np.bool_]:
    """Return which operations interpolate bicubically: as the setting says, or by uniform numbers."""
    return draws < 0.5 if interpolation == "random" else np.full(draws.shape, interpolation == "bicubic")
