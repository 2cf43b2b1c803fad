"""The operations that change colours and not places, on batches of uint8 images.

Each takes images (batch, 3, height, width), as Pillow would see them, and one number per image. Three
count an image's colours first: what they are given may be a part of the images that they count.
Roundings follow Pillow's: published accuracies were reached with them.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEVELS = 256
GRAY_WEIGHTS = (19595, 38470, 7471)  # of red, green and blue, in 65536ths


def auto_contrast(images: Tensor, _: Tensor, counted: Tensor | None = None) -> Tensor:
    """Stretch each channel to the whole range; `counted` images, if not these themselves, tell the range."""
    ends = (images if counted is None else counted).flatten(2).aminmax(dim=2)
    low, high = (end.float()[..., None, None] for end in ends)
    # A channel of one colour stays as it is.
    low, scale = torch.where(high > low, low, 0), torch.where(high > low, 255 / (high - low), 1)
    return images.float().sub_(low).mul_(scale).clamp_(0, 255).to(torch.uint8)


def equalize(images: Tensor, _: Tensor, counted: Tensor | None = None) -> Tensor:
    """Spread each channel's colours so that all of `counted`, or of the images, are about as frequent."""
    channels = (images if counted is None else counted).flatten(0, 1).flatten(1)  # (batch x 3, pixels)
    counts = _frequencies(channels)
    levels = torch.arange(LEVELS, device=images.device)
    last = (levels * (counts > 0)).amax(dim=1, keepdim=True)  # (batch x 3, 1) brightest colour
    step = (channels.shape[1] - counts.gather(1, last)) // (LEVELS - 1)
    before = counts.cumsum(dim=1) - counts
    table = (step // 2 + before) // step.clamp(min=1)
    table = torch.where(step > 0, table.clamp(max=255), levels)  # (batch x 3, 256)
    return table.to(torch.uint8).gather(1, images.flatten(0, 1).flatten(1).long()).view(images.shape)


def _frequencies(channels: Tensor) -> Tensor:
    """Count the colours of uint8 channels, (channels, pixels) to (channels, 256)."""
    if channels.device.type == "cpu":  # a tenth of the time; on a GPU the host would wait for it
        return torch.stack([torch.bincount(channel, minlength=LEVELS) for channel in channels])
    places = channels.long()
    counts = torch.zeros(len(channels), LEVELS, dtype=torch.long, device=channels.device)
    return counts.scatter_add_(1, places, torch.ones_like(places))


def invert(images: Tensor, _: Tensor) -> Tensor:
    """Turn each colour into its opposite."""
    return 255 - images


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep so many leading bits; with none the image is black."""
    kept = 256 - 2 ** (8 - bits)  # (batch,)
    return images & kept.to(torch.uint8).view(-1, 1, 1, 1)


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Invert colours from the threshold up."""
    lowest = thresholds.to(torch.int16).view(-1, 1, 1, 1)  # up to 256: then nothing is inverted
    return images ^ (images >= lowest).to(torch.uint8).mul_(255)


def solarize_add(images: Tensor, amounts: Tensor) -> Tensor:
    """Brighten the darker half of the colours."""
    # Below 128 nothing overflows: at most 127 + 128.
    return images + (images < LEVELS // 2) * amounts.to(torch.uint8).view(-1, 1, 1, 1)


def brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Move away from black."""
    return _blend(torch.zeros((), device=images.device), images, factors)


def contrast(images: Tensor, factors: Tensor, counted: Tensor | None = None) -> Tensor:
    """Move away from the mean gray of `counted`, or of the images."""
    mean = _gray(images if counted is None else counted).mean(dim=(1, 2, 3))
    mean = (mean + 0.5).floor().view(-1, 1, 1, 1)
    return _blend(mean, images, factors)


def color(images: Tensor, factors: Tensor) -> Tensor:
    """Move away from gray."""
    return _blend(_gray(images), images, factors)


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Move away from a smoothed image; the outermost pixels stay."""
    pixels = images.float()
    across = pixels[..., :-2] + pixels[..., 1:-1] + pixels[..., 2:]
    around = across[..., :-2, :] + across[..., 1:-1, :] + across[..., 2:, :]  # 3 x 3 pixels, summed
    smooth = pixels.clone()
    # Each pixel counts five times, its eight neighbours once.
    smooth[..., 1:-1, 1:-1] = around.add_(pixels[..., 1:-1, 1:-1], alpha=4).div_(13).add_(0.5).floor_()
    return _blend(smooth, images, factors)


def _gray(images: Tensor) -> Tensor:
    red, green, blue = images.to(torch.int32).unbind(dim=1)
    weighted = GRAY_WEIGHTS[0] * red + GRAY_WEIGHTS[1] * green + GRAY_WEIGHTS[2] * blue
    return ((weighted + 2**15) >> 16).float().unsqueeze(1)  # (batch, 1, height, width)


def _blend(away_from: Tensor, images: Tensor, factors: Tensor) -> Tensor:
    moved = images.float().sub_(away_from).mul_(factors.view(-1, 1, 1, 1)).add_(away_from)
    return moved.clamp_(0, 255).to(torch.uint8)
