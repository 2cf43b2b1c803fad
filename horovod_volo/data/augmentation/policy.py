"""Draws the operations of each image by the policy that `--aa` names, or those of color jitter.

The names and the notation of the policies are timm's: rand-..., original, originalr, v0, v0r, 3a, augmix-...
Draws are pure functions of (seed, epoch, sample index).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from horovod_volo.config.data_settings import Data
from horovod_volo.core.rng import Purpose, uniforms_of_samples
from horovod_volo.data.augmentation import operations as ops
from horovod_volo.data.augmentation.augmix import AUGMIX, AugMix, draw_augmix, parse_augmix
from horovod_volo.data.augmentation.auto_augment import (
    POLICIES,
    THREE_AUGMENT,
    AutoAugment,
    draw_auto_augment,
    parse_auto_augment,
)
from horovod_volo.data.augmentation.rand_augment import Operations, RandAugment, draw_rand_augment, parse


def parse_policy(policy: str) -> RandAugment | AutoAugment | AugMix:
    """Parse timm's syntax of any policy; raise UserError where it is not understood."""
    first = policy.split("-")[0]
    if first == AUGMIX:
        return parse_augmix(policy)
    return parse_auto_augment(policy) if first in POLICIES else parse(policy)


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
