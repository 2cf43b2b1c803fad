"""Distorts the colours of images as a plan says: brightness, contrast, saturation and hue.

After each step levels are clipped and truncated to whole numbers, as in mmsegmentation. Saturation and hue
are those of HSV with exact colours; OpenCV rounds hue and saturation, which differs by some levels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horovod_volo.data.scenes.scene_plan import Distortion


def distort(pixels: Tensor, distortion: Distortion) -> Tensor:
    """Return an image (3, height, width) of float levels 0 to 255, distorted."""
    if distortion.brightness:
        pixels = _levels(pixels + distortion.brightness)
    if not distortion.contrast_last:
        pixels = _contrast(pixels, distortion)
    if distortion.saturation != 1.0:
        pixels = _saturation(pixels, distortion.saturation)
    if distortion.hue:
        pixels = _hue(pixels, distortion.hue)
    return _contrast(pixels, distortion) if distortion.contrast_last else pixels


def _levels(pixels: Tensor) -> Tensor:
    return pixels.clamp_(0, 255).floor_()


def _contrast(pixels: Tensor, distortion: Distortion) -> Tensor:
    return pixels if distortion.contrast == 1.0 else _levels(pixels * distortion.contrast)


def _saturation(pixels: Tensor, factor: float) -> Tensor:
    highest = pixels.amax(dim=0, keepdim=True)
    saturation = 1 - pixels.amin(dim=0, keepdim=True) / highest.clamp_min(1)
    # Of HSV's three values the saturation alone changes: to at most 1.
    factors = torch.minimum(torch.full_like(saturation, factor), 1 / saturation.clamp_min(1e-6))
    return (highest - (highest - pixels) * factors).round_().clamp_(0, 255)


def _hue(pixels: Tensor, shift: float) -> Tensor:
    red, green, blue = pixels
    highest, span = pixels.amax(dim=0), pixels.amax(dim=0) - pixels.amin(dim=0)
    divisor = span.clamp_min(1e-6)
    # In sixths of the circle: 0 red, 2 green, 4 blue.
    hue = torch.where(
        highest == red,
        (green - blue) / divisor,
        torch.where(highest == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    channels = []
    for offset in (5, 3, 1):  # of red, green and blue
        distance = (hue + 6 * shift + offset) % 6
        channels.append(highest - span * torch.minimum(distance, 4 - distance).clamp_(0, 1))
    return torch.stack(channels).round_().clamp_(0, 255)
