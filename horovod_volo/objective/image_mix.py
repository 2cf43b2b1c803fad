"""Mixup and CutMix: each image is mixed with its partner in the reversed batch, before the model.

Invariant: a mix is a pure function of (seed, step, rank, micro-batch). It is refused together with
MixToken, which would mix tokens twice, and with token labels, which it does not mix.
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
    """The mix of one micro-batch: CutMix if it has a box, else Mixup."""

    lam: float  # weight of the image's own class
    box: tuple[int, int, int, int] | None = None  # top, left, height, width in pixels

    def images(self, images: Tensor) -> Tensor:
        """Return mixed images (batch, 3, side, side); the middle image of an odd batch is its own partner."""
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
        """Return tokens unchanged: the images are mixed."""
        return tokens


def draw_image_mix(
    settings: Objective, seed: int, step: int, rank: int, pass_index: int, side: int
) -> ImageMix:
    """Draw the mix of a micro-batch; `side` is that of its images, in pixels."""
    generator = np.random.Generator(philox(Purpose.IMAGE_MIX, seed, step, rank, pass_index))
    mixed, switch, row, column = generator.random(4)
    if mixed >= settings.mixup_prob:
        return ImageMix(lam=1.0)
    pasted = settings.cutmix > 0 and (settings.mixup == 0 or switch < settings.mixup_switch_prob)
    strength = settings.cutmix if pasted else settings.mixup
    lam = float(generator.beta(strength, strength))
    if not pasted:
        return ImageMix(lam=lam)
    half = int(side * sqrt(1.0 - lam)) // 2
    top, left = max(int(row * side) - half, 0), max(int(column * side) - half, 0)
    bottom, right = min(int(row * side) + half, side), min(int(column * side) + half, side)
    height, width = bottom - top, right - left
    # The box may be clipped at the edge of the image: the weight follows from its actual area.
    return ImageMix(lam=1.0 - height * width / side**2, box=(top, left, height, width))
