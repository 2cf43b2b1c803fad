"""Mixup and CutMix: each image is mixed with its partner in the reversed batch, before the network.

Invariant: a mix is a pure function of (seed, step, rank, pass). Recipes with MixToken or token
labels do without: there the tokens would be mixed twice, or their labels not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from torch import Tensor

from horovod_volo.config.schema import Objective
from horovod_volo.core.rng import Purpose, philox


@dataclass(frozen=True)
class ImageMix:
    """How the images of one pass are mixed: pasted where there is a box, else blended."""

    lam: float  # of an image's own class in its target
    box: tuple[int, int, int, int] | None = None  # top, left, height, width in pixels

    def images(self, images: Tensor) -> Tensor:
        """Return mixed images (batch, 3, side, side); the middle one of an odd batch is its own partner."""
        if self.lam == 1.0:
            return images
        if self.box is None:
            return images.lerp(images.flip(0), 1.0 - self.lam)
        top, left, height, width = self.box
        place = (..., slice(top, top + height), slice(left, left + width))
        mixed = images.clone()
        mixed[place] = images[place].flip(0)
        return mixed

    def swap_tokens(self, tokens: Tensor) -> Tensor:
        """Leave tokens as they are: images were mixed before."""
        return tokens


def draw_image_mix(
    settings: Objective, seed: int, step: int, rank: int, pass_index: int, side: int
) -> ImageMix:
    """Draw how a pass of images of so many pixels a side is mixed."""
    generator = np.random.Generator(philox(Purpose.IMAGE_MIX, seed, step, rank, pass_index))
    mixed, switch, row, column = generator.random(4)
    if mixed >= settings.mixup_prob:
        return ImageMix(lam=1.0)
    pasted = settings.cutmix > 0 and (settings.mixup == 0 or switch < settings.mixup_switch_prob)
    strength = settings.cutmix if pasted else settings.mixup
    share = float(generator.beta(strength, strength))
    if not pasted:
        return ImageMix(lam=share)
    half = int(side * sqrt(1.0 - share)) // 2
    top, left = max(int(row * side) - half, 0), max(int(column * side) - half, 0)
    bottom, right = min(int(row * side) + half, side), min(int(column * side) + half, side)
    height, width = bottom - top, right - left
    # What the image's edge cut off the box stays with the image: the share follows the box.
    return ImageMix(lam=1.0 - height * width / side**2, box=(top, left, height, width))
