"""The policies of AutoAugment, 3-Augment and AugMix: what --aa takes besides RandAugment.

A policy of AutoAugment is a list of sub-policies, of which each image gets one: up to two operations, each
with a probability and a magnitude of its own. The policies and their names are timm's: those of the
AutoAugment paper (`original`) and of TensorFlow's EfficientNet (`v0`), both also with the research variant
of posterize, which keeps fewer bits at a higher magnitude (`originalr`, `v0r`), and 3-Augment (`3a`).

AugMix draws chains of operations for each image, and how their results are mixed:

    mixture = sum over chains of weight x chain(image)          weights ~ Dirichlet(alpha, ..., alpha)
    result  = (1 - share) x image + share x mixture             share   ~ Beta(alpha, alpha)

Invariant: draws are pure functions of (seed, epoch, sample index), and the order of a policy's sub-policies
never changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.config.data_settings import Data
from horovod_volo.core.rng import Purpose, bits_of_samples, generator, uniforms_of_samples
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.operations import OPERATIONS, Floats, Kind, Operation, no_argument
from horovod_volo.data.augmentation.policy import (
    POLICIES,
    UNIFORM,
    Mixing,
    Operations,
    Policy,
    choose,
    draw_color_jitter,
    interpolations,
    levels,
    signs,
    whole_number,
)

_DRAWS_PER_LAYER = 6
_BLUR_RADIUS = (0.1, 2.0)  # pixels
_BOX_FILTERS = 3
_BLUR_UNITS = 2**24
_AUGMIX_DRAWS = 5
_DEEPEST_CHAIN = 3  # operations of a chain, where their number is drawn


def gaussian_blur(images: Tensor, radii: Tensor) -> Tensor:
    """Blur with a standard deviation of `radii` pixels, below 2.4, as Pillow does: by three box filters."""
    # The box of one filter: `whole` pixels on each side of the centre count fully, the next one in part.
    variance = radii.float().square() / _BOX_FILTERS
    whole = ((torch.sqrt(12 * variance + 1) - 1) / 2).floor_()
    part = (2 * whole + 1) * (whole * (whole + 1) - 3 * variance) / (6 * (variance - (whole + 1).square()))
    # Weights are whole numbers of 2^-24, as Pillow's: often a sum lies halfway between two levels.
    inner = (_BLUR_UNITS / (2 * (whole + part) + 1)).double().floor_().view(-1, 1, 1, 1)
    whole = whole.view(-1, 1, 1, 1)
    outer = ((_BLUR_UNITS - (2 * whole + 1) * inner) / 2).floor_()
    near, far = torch.where(whole > 0, inner, outer), torch.where(whole > 0, outer, 0)
    pixels = images.double()
    for _ in range(2):  # along rows, then along columns
        for _ in range(_BOX_FILTERS):
            padded = torch.nn.functional.pad(pixels, (2, 2, 0, 0), mode="replicate")
            length = pixels.shape[3]
            ends, middles = (
                padded[..., first : first + length] + padded[..., last : last + length]
                for first, last in ((0, 4), (1, 3))
            )
            pixels = (pixels * inner).addcmul_(middles, near).addcmul_(ends, far)
            pixels = pixels.add_(_BLUR_UNITS / 2).mul_(1 / _BLUR_UNITS).floor_()
        pixels = pixels.mT
    return pixels.to(torch.uint8)


# Each pixel depends on the pixels that its six box filters reach. No list that draws by level has it.
GAUSSIAN_BLUR = Operation(
    16, "GaussianBlur", Kind.COLOR, no_argument, gaussian_blur, neighbors=2 * _BOX_FILTERS
)
OPERATIONS[int(GAUSSIAN_BLUR)] = GAUSSIAN_BLUR


class PolicyStep(NamedTuple):
    """One operation of a sub-policy, by the name that timm gives it."""

    name: str
    probability: float
    magnitude: float


SubPolicies = tuple[tuple[PolicyStep, ...], ...]

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
    "GaussianBlurRand": (GAUSSIAN_BLUR, _blur_radius),
}


@dataclass(frozen=True)
class AutoAugment(Policy):
    """A policy such as original-mstd0.5."""

    sub_policies: SubPolicies  # equally probable
    with_color_jitter: bool = False  # comes last
    magnitude_std: float = 0.0

    words = {"mstd": ("magnitude_std", float)}  # noqa: RUF012

    def draw(self, seed: int, epoch: int, indices: NDArray[np.int64], settings: Data) -> Operations:
        """Draw a sub-policy for each image, and which of its operations are applied and how."""
        layers = max(map(len, self.sub_policies))
        draws = uniforms_of_samples(1 + layers * _DRAWS_PER_LAYER, Purpose.AUTO_AUGMENT, seed, epoch, indices)
        chosen = np.floor(draws[:, 0] * len(self.sub_policies)).astype(np.int64)  # (batch,)
        by_layer = draws[:, 1:].reshape(len(indices), layers, -1)
        applied, angle, radius, draw, filtering, _ = by_layer.transpose(2, 0, 1)  # (batch, layers) each
        kinds = np.full((len(indices), layers), int(ops.NONE), dtype=np.int64)
        arguments = np.zeros(kinds.shape)
        for number, steps in enumerate(self.sub_policies):
            rows = np.flatnonzero(chosen == number)
            for layer, step in enumerate(steps):
                operation, argument = _NAMED[step.name]
                level = levels(step.magnitude, self.magnitude_std, angle[rows, layer], radius[rows, layer])
                kinds[rows, layer] = np.where(applied[rows, layer] < step.probability, operation, ops.NONE)
                arguments[rows, layer] = argument(level, draw[rows, layer])
        # Magnitude 0 moves nothing. Pillow returns such an image as it is; resampling it would round.
        kinds[np.isin(kinds, ops.GEOMETRIC) & (arguments == 0)] = ops.NONE
        bicubic = interpolations(filtering, settings.train_interpolation)
        drawn = Operations(kinds, arguments.astype(np.float32), bicubic)
        if not self.with_color_jitter:
            return drawn
        jitter = draw_color_jitter(seed, epoch, indices, settings.color_jitter)
        return Operations(
            np.concatenate([drawn.kinds, jitter.kinds], axis=1),
            np.concatenate([drawn.arguments, jitter.arguments], axis=1),
            np.concatenate([drawn.bicubic, jitter.bicubic], axis=1),
        )


def _above_zero(value: float) -> float:
    if not value:
        raise ValueError
    return value


@dataclass(frozen=True)
class AugMix(Policy):
    """A policy such as augmix-m5-w4-d2."""

    magnitude: float = 3.0
    width: int = 3  # chains
    depth: int = 0  # operations of each chain; 0: drawn
    alpha: float = 1.0
    magnitude_std: float = UNIFORM

    words = {  # noqa: RUF012
        "m": ("magnitude", float),
        "w": ("width", lambda value: _above_zero(whole_number(value))),
        "d": ("depth", whole_number),
        "a": ("alpha", _above_zero),
        "mstd": ("magnitude_std", float),
    }

    def draw(self, seed: int, epoch: int, indices: NDArray[np.int64], settings: Data) -> Operations:
        """Draw the operations of all chains of each image, (batch, chains x depth), and their mixing."""
        width, depth, batch = self.width, self.depth or _DEEPEST_CHAIN, len(indices)
        count = width * (1 + depth * _AUGMIX_DRAWS)
        draws = uniforms_of_samples(count, Purpose.AUGMIX, seed, epoch, indices).reshape(batch, width, -1)
        by_layer = draws[..., 1:].reshape(batch, width, depth, _AUGMIX_DRAWS)
        chosen, angle, radius, sign, filtering = np.moveaxis(by_layer, -1, 0)  # (batch, width, depth) each
        level = levels(self.magnitude, self.magnitude_std, angle, radius)
        kinds, arguments = choose(_AUGMIX_CHOICES, chosen, level, sign, increasing=True)
        lengths = np.full((batch, width), depth)
        if not self.depth:
            lengths = 1 + np.floor(draws[..., 0] * _DEEPEST_CHAIN).astype(np.int64)
        kinds = np.where(np.arange(depth) < lengths[..., None], kinds, int(ops.NONE))
        bicubic = interpolations(filtering, settings.train_interpolation)
        flat, mixing = (batch, width * depth), self._draw_mixing(seed, epoch, indices)
        return Operations(kinds.reshape(flat), arguments.reshape(flat), bicubic.reshape(flat), mixing)

    def _draw_mixing(self, seed: int, epoch: int, indices: NDArray[np.int64]) -> Mixing:
        weights = np.empty((len(indices), self.width), dtype=np.float32)
        shares = np.empty(len(indices), dtype=np.float32)
        for row, bits in enumerate(bits_of_samples(Purpose.AUGMIX_WEIGHTS, seed, epoch, indices).tolist()):
            random = generator(bits)
            weights[row] = random.dirichlet([self.alpha] * self.width)
            shares[row] = random.beta(self.alpha, self.alpha)
        return Mixing(weights, shares)


_AUGMIX_CHOICES = ops.named(
    "AutoContrast Color Contrast Brightness Sharpness Equalize Rotate Posterize Solarize "
    "ShearX ShearY TranslateXRel TranslateYRel"
)


def _sub_policies(text: str) -> SubPolicies:
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
_THREE_AUGMENT = "Solarize 1 5; Desaturate 1 10; GaussianBlurRand 1 10"
_REPLACED = {"original": "PosterizeOriginal", "v0": "Posterize"}  # by PosterizeIncreasing, in variant r

for _name, _text in (("original", _ORIGINAL), ("v0", _V0)):
    POLICIES.register(_name, AutoAugment(_sub_policies(_text)))
    _variant = _text.replace(_REPLACED[_name], "PosterizeIncreasing")
    POLICIES.register(f"{_name}r", AutoAugment(_sub_policies(_variant)))
POLICIES.register("3a", AutoAugment(_sub_policies(_THREE_AUGMENT), with_color_jitter=True))
POLICIES.register("augmix", AugMix())
