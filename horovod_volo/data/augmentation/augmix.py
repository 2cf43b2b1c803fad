"""Draws the chains of operations of AugMix for each image, and how their results are mixed.

    mixture = sum over chains of weight x chain(image)          weights ~ Dirichlet(alpha, ..., alpha)
    result  = (1 - share) x image + share x mixture             share   ~ Beta(alpha, alpha)

The notation is timm's: m magnitude, w number of chains, d operations of a chain (0: 1 to 3 at random),
a alpha, mstd standard deviation of the magnitude; without mstd it is uniform up to m. Draws are pure
functions of (seed, epoch, sample index).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.errors import UserError
from horovod_volo.core.rng import Purpose, bits_of_samples, generator, uniforms_of_samples
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.rand_augment import (
    UNIFORM,
    Mixing,
    Operations,
    interpolations,
    levels,
    select_arguments,
    signs,
)

AUGMIX = "augmix"
_DRAWS_OF_LAYER = 5
_DEEPEST = 3  # operations of a chain, where their number is drawn

CHOICES = (
    ops.AUTO_CONTRAST,
    ops.COLOR,
    ops.CONTRAST,
    ops.BRIGHTNESS,
    ops.SHARPNESS,
    ops.EQUALIZE,
    ops.ROTATE,
    ops.POSTERIZE,
    ops.SOLARIZE,
    ops.SHEAR_X,
    ops.SHEAR_Y,
    ops.TRANSLATE_X,
    ops.TRANSLATE_Y,
)


@dataclass(frozen=True)
class AugMix:
    """The parameters of a policy such as augmix-m5-w4-d2."""

    magnitude: float = 3.0
    width: int = 3  # chains
    depth: int = 0  # operations of each chain; 0: drawn
    alpha: float = 1.0
    magnitude_std: float = UNIFORM


def parse_augmix(policy: str) -> AugMix:
    """Parse timm's syntax; raise UserError where it is not understood."""
    parsed = AugMix()
    for part in policy.split("-")[1:]:
        match = re.fullmatch(r"(mstd|m|w|d|a|b)(\d+(?:\.\d+)?)", part)
        fits = match is not None and (match[1] not in "wdb" or match[2].isdecimal())
        if match is None or not fits or (match[1] in "wa" and not float(match[2])):
            raise UserError(
                f"--aa {policy}: {part!r} is not known. Known are m, a and mstd with a number and w and d "
                "with a whole number, as in augmix-m5-w4-d2."
            )
        if match[1] == "b" and int(match[2]):
            raise UserError(
                f"--aa {policy}: b1, which approximates AugMix to save time, is not known here. Drop it."
            )
        parsed = _with(parsed, match[1], float(match[2]))
    return parsed


def _with(parsed: AugMix, key: str, value: float) -> AugMix:
    match key:
        case "m":
            return replace(parsed, magnitude=value)
        case "w":
            return replace(parsed, width=int(value))
        case "d":
            return replace(parsed, depth=int(value))
        case "a":
            return replace(parsed, alpha=value)
        case "mstd":
            return replace(parsed, magnitude_std=value)
        case _:
            return parsed


def draw_augmix(
    seed: int, epoch: int, indices: NDArray[np.int64], policy: AugMix, interpolation: str
) -> Operations:
    """Draw the operations of all chains of each image, (batch, chains x depth), and their mixing."""
    width, depth, batch = policy.width, policy.depth or _DEEPEST, len(indices)
    draws = uniforms_of_samples(
        width * (1 + depth * _DRAWS_OF_LAYER), Purpose.AUGMIX, seed, epoch, indices
    ).reshape(batch, width, -1)
    of_layers = draws[..., 1:].reshape(batch, width, depth, _DRAWS_OF_LAYER)
    chosen, angle, radius, sign, filtering = np.moveaxis(of_layers, -1, 0)  # (batch, width, depth) each
    kinds = np.array(CHOICES, dtype=np.int64)[np.floor(chosen * len(CHOICES)).astype(np.int64)]
    level = levels(policy.magnitude, policy.magnitude_std, angle, radius)
    arguments = select_arguments(CHOICES, kinds, level, signs(sign), increasing=True)
    lengths = np.full((batch, width), depth)
    if not policy.depth:
        lengths = 1 + np.floor(draws[..., 0] * _DEEPEST).astype(np.int64)
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
