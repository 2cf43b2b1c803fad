"""Which operations of RandAugment (or of colour jitter) an image undergoes, and how strongly.

Spellings, operations and strengths are timm's, so that a published `--aa` means what it meant. All
draws are pure functions of (seed, epoch, sample index).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from horovod_volo.config.schema import Data
from horovod_volo.core.errors import UserError
from horovod_volo.core.rng import Purpose, uniforms_of_samples

DRAWS_PER_LAYER = 6
HIGHEST_LEVEL = 10.0
UNIFORM_FROM_SPREAD = 100.0  # a larger mstd means: any magnitude up to m, all alike


class Operation(IntEnum):
    """What one layer does to an image."""

    NONE = 0
    AUTO_CONTRAST = 1
    EQUALIZE = 2
    INVERT = 3
    ROTATE = 4  # argument: degrees, counter-clockwise
    POSTERIZE = 5  # bits kept
    SOLARIZE = 6  # threshold above which colours are inverted
    SOLARIZE_ADD = 7  # what is added to colours below 128
    COLOR = 8  # factor, as of the next three
    CONTRAST = 9
    BRIGHTNESS = 10
    SHARPNESS = 11
    SHEAR_X = 12  # pixels to the side per pixel down
    SHEAR_Y = 13
    TRANSLATE_X = 14  # share of the width
    TRANSLATE_Y = 15


GEOMETRIC = (
    Operation.ROTATE,
    Operation.SHEAR_X,
    Operation.SHEAR_Y,
    Operation.TRANSLATE_X,
    Operation.TRANSLATE_Y,
)


@dataclass(frozen=True)
class RandAugment:
    """The numbers of a spelling such as rand-m9-mstd0.5-inc1."""

    magnitude: float = 10.0
    layers: int = 2
    probability: float = 0.5
    spread: float = 0.0
    highest: float = HIGHEST_LEVEL
    increasing: bool = False


@dataclass(frozen=True, eq=False)
class Operations:
    """The operations of a batch, in the order of application."""

    kinds: NDArray[np.int64]  # (batch, layers) Operation
    arguments: NDArray[np.float32]  # (batch, layers)
    bicubic: NDArray[np.bool_]  # (batch, layers) how a geometric operation reads between pixels

    @property
    def moving(self) -> NDArray[np.bool_]:
        """Say which images are moved, not only recoloured, (batch,)."""
        return np.asarray(np.isin(self.kinds, GEOMETRIC).any(axis=1))

    def of(self, place: int) -> Operations:
        """Return those of one image alone."""
        alone = slice(place, place + 1)
        return Operations(self.kinds[alone], self.arguments[alone], self.bicubic[alone])


def parse(spelling: str) -> RandAugment:
    """Read timm's spelling; raise UserError where it says something else."""
    first, *rest = spelling.split("-")
    if first != "rand":
        raise UserError(f"--aa {spelling} is not known. Write RandAugment as rand-m9-mstd0.5-inc1.")
    numbers = RandAugment()
    for part in rest:
        found = re.fullmatch(r"(mstd|mmax|inc|m|n|p)(\d+(?:\.\d+)?)", part)
        if found is None:
            raise UserError(
                f"--aa {spelling}: {part!r} is not known. Known are m, n, p, mstd, mmax and inc with a "
                "number each, as in rand-m9-n2-p0.5-mstd0.5-inc1."
            )
        numbers = _with(numbers, found[1], float(found[2]))
    return numbers


def _with(numbers: RandAugment, key: str, value: float) -> RandAugment:
    match key:
        case "m":
            return replace(numbers, magnitude=value)
        case "n":
            return replace(numbers, layers=int(value))
        case "p":
            return replace(numbers, probability=value)
        case "mstd":
            return replace(numbers, spread=value)
        case "mmax":
            return replace(numbers, highest=value or HIGHEST_LEVEL)
        case _:
            return replace(numbers, increasing=bool(value))


def draw_operations(seed: int, epoch: int, indices: NDArray[np.int64], settings: Data) -> Operations:
    """Draw what each image undergoes."""
    if settings.aa:
        return _rand_augment(seed, epoch, indices, parse(settings.aa), settings.train_interpolation)
    if settings.color_jitter:
        return _color_jitter(seed, epoch, indices, settings.color_jitter)
    nothing = np.zeros((len(indices), 0))
    return Operations(nothing.astype(np.int64), nothing.astype(np.float32), nothing.astype(np.bool_))


def _rand_augment(
    seed: int, epoch: int, indices: NDArray[np.int64], numbers: RandAugment, interpolation: str
) -> Operations:
    chance = uniforms_of_samples(numbers.layers * DRAWS_PER_LAYER, Purpose.RAND_AUGMENT, seed, epoch, indices)
    chosen, fired, angle, radius, sign, between = chance.reshape(
        len(indices), numbers.layers, DRAWS_PER_LAYER
    ).transpose(2, 0, 1)  # (batch, layers) each
    kinds = 1 + np.floor(chosen * (len(Operation) - 1)).astype(np.int64)
    if numbers.spread > UNIFORM_FROM_SPREAD:
        magnitude = numbers.magnitude * radius
    else:  # a normal number out of two uniform ones
        normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * math.pi * angle)
        magnitude = numbers.magnitude + numbers.spread * normal
    level = magnitude.clip(0, numbers.highest) / HIGHEST_LEVEL
    arguments = _arguments(kinds, level, np.where(sign < 0.5, -1.0, 1.0), numbers.increasing)
    kinds = np.where(fired < numbers.probability, kinds, Operation.NONE)
    bicubic = between < 0.5 if interpolation == "random" else np.full(kinds.shape, interpolation == "bicubic")
    return Operations(kinds, arguments.astype(np.float32), bicubic)


def _arguments(
    kinds: NDArray[np.int64], level: NDArray[np.float64], sign: NDArray[np.float64], increasing: bool
) -> NDArray[np.float64]:
    bits = np.floor(4 * level)
    threshold = np.minimum(256, np.floor(256 * level))
    factor = 1.8 * level + 0.1
    if increasing:
        bits, threshold = 4 - bits, 256 - threshold
        factor = np.maximum(0.1, 1 + sign * 0.9 * level)
    amounts = {
        Operation.ROTATE: sign * 30 * level,
        Operation.POSTERIZE: bits.clip(0, 8),
        Operation.SOLARIZE: threshold,
        Operation.SOLARIZE_ADD: np.minimum(128, np.floor(110 * level)),
        Operation.COLOR: factor,
        Operation.CONTRAST: factor,
        Operation.BRIGHTNESS: factor,
        Operation.SHARPNESS: factor,
        Operation.SHEAR_X: sign * 0.3 * level,
        Operation.SHEAR_Y: sign * 0.3 * level,
        Operation.TRANSLATE_X: sign * 0.45 * level,
        Operation.TRANSLATE_Y: sign * 0.45 * level,
    }
    return np.select([kinds == kind for kind in amounts], list(amounts.values()), default=0.0)


def _color_jitter(seed: int, epoch: int, indices: NDArray[np.int64], most: float) -> Operations:
    """Change brightness, contrast and saturation, in random order."""
    chance = uniforms_of_samples(6, Purpose.COLOR_JITTER, seed, epoch, indices)  # (batch, draws)
    order = chance[:, :3].argsort(axis=1)
    kinds = np.array([Operation.BRIGHTNESS, Operation.CONTRAST, Operation.COLOR])[order]  # (batch, 3)
    low, high = max(0.0, 1 - most), 1 + most
    factors = low + (high - low) * chance[:, 3:]
    return Operations(kinds, factors.astype(np.float32), np.zeros(kinds.shape, dtype=np.bool_))
