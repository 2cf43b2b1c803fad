"""Draws the operations of RandAugment and AugMix and their arguments for each image.

The operations and their magnitudes are timm's, so that published settings mean the same here. AugMix draws
chains of operations for each image, and how their results are mixed:

    mixture = sum over chains of weight x chain(image)          weights ~ Dirichlet(alpha, ..., alpha)
    result  = (1 - share) x image + share x mixture             share   ~ Beta(alpha, alpha)

Draws are pure functions of (seed, epoch, sample index).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.rng import Purpose, bits_of_samples, generator, uniforms_of_samples
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.operations import RAND_V1, Floats, Operation

DRAWS_PER_LAYER = 6
HIGHEST_LEVEL = 10.0
UNIFORM_FROM_MSTD = 100.0  # a larger mstd means a uniform magnitude up to m, as in timm
UNIFORM = math.inf
_AUGMIX_DRAWS = 5
_DEEPEST_CHAIN = 3  # operations of a chain, where their number is drawn

AUGMIX_CHOICES = ops.named(
    "AutoContrast Color Contrast Brightness Sharpness Equalize Rotate Posterize Solarize "
    "ShearX ShearY TranslateXRel TranslateYRel"
)


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


@dataclass(frozen=True)
class AugMix:
    """The parameters of a policy such as augmix-m5-w4-d2."""

    magnitude: float = 3.0
    width: int = 3  # chains
    depth: int = 0  # operations of each chain; 0: drawn
    alpha: float = 1.0
    magnitude_std: float = UNIFORM


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


def draw_augmix(
    seed: int, epoch: int, indices: NDArray[np.int64], policy: AugMix, interpolation: str
) -> Operations:
    """Draw the operations of all chains of each image, (batch, chains x depth), and their mixing."""
    width, depth, batch = policy.width, policy.depth or _DEEPEST_CHAIN, len(indices)
    draws = uniforms_of_samples(
        width * (1 + depth * _AUGMIX_DRAWS), Purpose.AUGMIX, seed, epoch, indices
    ).reshape(batch, width, -1)
    of_layers = draws[..., 1:].reshape(batch, width, depth, _AUGMIX_DRAWS)
    chosen, angle, radius, sign, filtering = np.moveaxis(of_layers, -1, 0)  # (batch, width, depth) each
    kinds = np.array(AUGMIX_CHOICES, dtype=np.int64)[np.floor(chosen * len(AUGMIX_CHOICES)).astype(np.int64)]
    level = levels(policy.magnitude, policy.magnitude_std, angle, radius)
    arguments = select_arguments(AUGMIX_CHOICES, kinds, level, signs(sign), increasing=True)
    lengths = np.full((batch, width), depth)
    if not policy.depth:
        lengths = 1 + np.floor(draws[..., 0] * _DEEPEST_CHAIN).astype(np.int64)
    kinds = np.where(np.arange(depth) < lengths[..., None], kinds, int(ops.NONE))
    flat = (batch, width * depth)
    return Operations(
        kinds.reshape(flat),
        arguments.astype(np.float32).reshape(flat),
        interpolations(filtering, interpolation).reshape(flat),
        _draw_mixing(seed, epoch, indices, policy),
    )


def _draw_mixing(seed: int, epoch: int, indices: NDArray[np.int64], policy: AugMix) -> Mixing:
    weights = np.empty((len(indices), policy.width), dtype=np.float32)
    shares = np.empty(len(indices), dtype=np.float32)
    for row, bits in enumerate(bits_of_samples(Purpose.AUGMIX_WEIGHTS, seed, epoch, indices).tolist()):
        random = generator(bits)
        weights[row] = random.dirichlet([policy.alpha] * policy.width)
        shares[row] = random.beta(policy.alpha, policy.alpha)
    return Mixing(weights, shares)


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
