"""Draws the operations of each image by the policy that `--aa` names, or those of color jitter.

The names and the notation of the policies are timm's: rand-..., original, originalr, v0, v0r, 3a, augmix-...
Draws are pure functions of (seed, epoch, sample index).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import UserError
from horovod_volo.core.rng import Purpose, uniforms_of_samples
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.auto_augment import (
    POLICIES,
    THREE_AUGMENT,
    AutoAugment,
    draw_auto_augment,
)
from horovod_volo.data.augmentation.rand_augment import (
    HIGHEST_LEVEL,
    AugMix,
    Operations,
    RandAugment,
    draw_augmix,
    draw_rand_augment,
)

Policy = TypeVar("Policy", RandAugment, AutoAugment, AugMix)
# The field that each word of a policy sets, and what makes its value of the number; ValueError: it cannot.
Words = dict[str, tuple[str, Callable[[float], Any]]]


def _whole(value: float) -> int:
    if not value.is_integer():
        raise ValueError
    return int(value)


def _above_zero(value: float) -> float:
    if not value:
        raise ValueError
    return value


_RAND_AUGMENT: Words = {
    "m": ("magnitude", float),
    "n": ("layers", _whole),
    "p": ("probability", float),
    "mstd": ("magnitude_std", float),
    "mmax": ("max_magnitude", lambda value: value or HIGHEST_LEVEL),
    "inc": ("increasing", bool),
}
_AUTO_AUGMENT: Words = {"mstd": ("magnitude_std", float)}
_AUGMIX: Words = {
    "m": ("magnitude", float),
    "w": ("width", lambda value: _above_zero(_whole(value))),
    "d": ("depth", _whole),
    "a": ("alpha", _above_zero),
    "mstd": ("magnitude_std", float),
}


def parse_policy(policy: str) -> RandAugment | AutoAugment | AugMix:
    """Parse timm's syntax of any policy; raise UserError where it is not understood."""
    first = policy.split("-")[0]
    if first == "augmix":
        # timm's b1 approximates AugMix and is not known here; b0 is its default.
        return _parsed(AugMix(), policy.replace("-b0", ""), _AUGMIX, "augmix-m5-w4-d2")
    if first in POLICIES:
        return _parsed(AutoAugment(first), policy, _AUTO_AUGMENT, f"{first}-mstd0.5")
    if first in ops.RAND_AUGMENT_SETS:
        choices = ops.RAND_AUGMENT_SETS[first]
        return _parsed(RandAugment(choices), policy, _RAND_AUGMENT, "rand-m9-n2-p0.5-mstd0.5-inc1")
    raise UserError(
        f"--aa {policy} is not known. Write RandAugment as rand-m9-mstd0.5-inc1, AutoAugment as original, "
        "originalr, v0 or v0r, 3-Augment as 3a, or AugMix as augmix-m3-w3."
    )


def _parsed(parsed: Policy, policy: str, words: Words, example: str) -> Policy:
    for part in policy.split("-")[1:]:
        word = part.rstrip("0123456789.")
        try:
            field, value_of = words[word]
            parsed = replace(parsed, **{field: value_of(float(part.removeprefix(word)))})
        except (KeyError, ValueError):
            raise UserError(
                f"--aa {policy}: {part!r} is not known. Known are {', '.join(words)} with a number each, as "
                f"in {example}."
            ) from None
    return parsed


def draw_operations(seed: int, epoch: int, indices: NDArray[np.int64], settings: Data) -> Operations:
    """Draw the operations of each image."""
    jitter = settings.color_jitter
    if not settings.aa:
        return _draw_color_jitter(seed, epoch, indices, jitter)
    policy, interpolation = parse_policy(settings.aa), settings.train_interpolation
    if isinstance(policy, RandAugment):
        return draw_rand_augment(seed, epoch, indices, policy, interpolation)
    if isinstance(policy, AugMix):
        return draw_augmix(seed, epoch, indices, policy, interpolation)
    drawn = draw_auto_augment(seed, epoch, indices, policy, interpolation)
    if policy.name != THREE_AUGMENT:
        return drawn
    # Color jitter is a part of 3-Augment, and comes last.
    return drawn.followed_by(_draw_color_jitter(seed, epoch, indices, jitter))


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
