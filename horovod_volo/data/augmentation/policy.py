"""Draws the operations of each training image by the policy that `--aa` names, or those of color jitter.

The notation of RandAugment, its operations and magnitudes are timm's: published settings mean the same here.

Invariant: draws are pure functions of (seed, epoch, sample index).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import Registry
from horovod_volo.core.rng import Purpose, uniforms_of_samples
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.operations import OPERATIONS, Floats, Kind, Operation

HIGHEST_LEVEL = 10.0
_UNIFORM_FROM_MSTD = 100.0  # a larger mstd means a uniform magnitude up to m, as in timm
_DRAWS_PER_LAYER = 6
_FIRST_OF_PLUGINS = 1000


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

    def of(self, rows: slice) -> "Operations":
        """Return those of some images of the batch."""
        return Operations(self.kinds[rows], self.arguments[rows], self.bicubic[rows])


def _whole_number(value: float) -> int:
    if not value.is_integer():
        raise ValueError
    return int(value)


# The field of RandAugment that each word sets, and what makes its value of the number; ValueError: it cannot.
_WORDS: dict[str, tuple[str, Callable[[float], Any]]] = {
    "m": ("magnitude", float),
    "n": ("layers", _whole_number),
    "p": ("probability", float),
    "mstd": ("magnitude_std", float),
    "mmax": ("max_magnitude", lambda value: value or HIGHEST_LEVEL),
    "inc": ("increasing", bool),
}


@dataclass(frozen=True)
class RandAugment:
    """The parameters of a policy such as rand-m9-mstd0.5-inc1."""

    choices: Sequence[Operation] = ops.RAND_V1
    magnitude: float = 10.0
    layers: int = 2
    probability: float = 0.5
    magnitude_std: float = 0.0
    max_magnitude: float = HIGHEST_LEVEL
    increasing: bool = False

    def draw(self, seed: int, epoch: int, indices: NDArray[np.int64], settings: Data) -> Operations:
        """Draw `layers` operations for each image, each one of `choices` or NONE."""
        count = self.layers * _DRAWS_PER_LAYER
        draws = uniforms_of_samples(count, Purpose.RAND_AUGMENT, seed, epoch, indices)
        by_layer = draws.reshape(len(indices), self.layers, _DRAWS_PER_LAYER)
        chosen, applied, angle, radius, sign, filtering = by_layer.transpose(2, 0, 1)  # (batch, layers) each
        kinds = np.array(self.choices, dtype=np.int64)[np.floor(chosen * len(self.choices)).astype(np.int64)]
        level, signs = self._levels(angle, radius), np.where(sign < 0.5, -1.0, 1.0)
        arguments = np.select(
            [kinds == choice for choice in self.choices],
            [choice.argument(level, signs, self.increasing) for choice in self.choices],
        )
        kinds = np.where(applied < self.probability, kinds, ops.NONE)
        bicubic = interpolations(filtering, settings.train_interpolation)
        return Operations(kinds, arguments.astype(np.float32), bicubic)

    def _levels(self, angle: Floats, radius: Floats) -> Floats:
        """Return levels from 0 to 1, given two uniform numbers for each."""
        if self.magnitude_std > _UNIFORM_FROM_MSTD:
            drawn = self.magnitude * radius
        else:  # Box-Muller: a normal number from two uniform ones
            normal = np.sqrt(-2 * np.log1p(-radius)) * np.cos(2 * math.pi * angle)
            drawn = self.magnitude + self.magnitude_std * normal
        return drawn.clip(0, self.max_magnitude) / HIGHEST_LEVEL


POLICIES: Registry[RandAugment] = Registry("augmentation policy", "--aa")  # by the first word of --aa
POLICIES.register("rand", RandAugment())


def register_rand_augment(name: str, operations: Sequence[Operation]) -> None:
    """Let `--aa NAME-m9-...` draw from these operations: entries of the table, or new ones of a plugin."""
    if name in POLICIES.names() or not name.isidentifier():
        raise UserError(f"A RandAugment set cannot be named {name!r}. Choose an unused name of one word.")
    for operation in operations:
        if OPERATIONS.get(operation) is operation:
            continue
        if operation < _FIRST_OF_PLUGINS or operation in OPERATIONS or operation.kind is Kind.GEOMETRIC:
            raise UserError(
                f"The operation {operation.name} cannot be registered. Give it an unused number of "
                f"{_FIRST_OF_PLUGINS} or more and Kind.COLOR or Kind.HISTOGRAM."
            )
        OPERATIONS[int(operation)] = operation
    POLICIES.register(name, RandAugment(tuple(operations)))


def parse_policy(text: str) -> RandAugment:
    """Parse timm's syntax; raise UserError where it is not understood."""
    first, *parts = text.split("-")
    policy = POLICIES.find(first)
    for part in parts:
        word = part.rstrip("0123456789.")
        try:
            field, value_of = _WORDS[word]
            policy = replace(policy, **{field: value_of(float(part.removeprefix(word)))})
        except (KeyError, ValueError):
            raise UserError(
                f"--aa {text}: {part!r} is not known. After {first}, --aa takes {', '.join(_WORDS)}, "
                "with a number each."
            ) from None
    return policy


def draw_operations(seed: int, epoch: int, indices: NDArray[np.int64], settings: Data) -> Operations:
    """Draw the operations of each image by --aa; without it, those of color jitter."""
    if settings.aa:
        return parse_policy(settings.aa).draw(seed, epoch, indices, settings)
    return _draw_color_jitter(seed, epoch, indices, settings.color_jitter)


def _draw_color_jitter(seed: int, epoch: int, indices: NDArray[np.int64], strength: float) -> Operations:
    """Draw factors for brightness, contrast and saturation, and their order."""
    if not strength:
        nothing = np.zeros((len(indices), 0))
        return Operations(nothing.astype(np.int64), nothing.astype(np.float32), nothing.astype(np.bool_))
    draws = uniforms_of_samples(6, Purpose.COLOR_JITTER, seed, epoch, indices)  # (batch, 6)
    order = draws[:, :3].argsort(axis=1)
    kinds = np.array([ops.BRIGHTNESS, ops.CONTRAST, ops.COLOR], dtype=np.int64)[order]  # (batch, 3)
    low, high = max(0.0, 1 - strength), 1 + strength
    factors = low + (high - low) * draws[:, 3:]
    return Operations(kinds, factors.astype(np.float32), np.zeros(kinds.shape, dtype=np.bool_))


def interpolations(draws: Floats, interpolation: str) -> NDArray[np.bool_]:
    """Return which operations interpolate bicubically: as the setting says, or by uniform numbers."""
    return draws < 0.5 if interpolation == "random" else np.full(draws.shape, interpolation == "bicubic")
