"""Operations that map pixels to other values, on batches of uint8 images.

Each takes images (batch, 3, height, width) and one argument for each image, (batch,). Three of them use a
histogram or the mean of the image; they also work on crops, given the whole images as `counted`. Rounding
follows Pillow, with which published accuracies were reached.
"""

import torch
from torch import Tensor

LEVELS = 256
GRAY_WEIGHTS = (19595, 38470, 7471)  # of red, green and blue, in 65536ths


def auto_contrast(images: Tensor, _: Tensor, counted: Tensor | None = None) -> Tensor:
    """Stretch each channel from its range in `counted` (default: the images) to the full range."""
    ends = (images if counted is None else counted).flatten(2).aminmax(dim=2)
    low, high = (end.float()[..., None, None] for end in ends)
    # A constant channel is not changed.
    low, scale = torch.where(high > low, low, 0), torch.where(high > low, 255 / (high - low), 1)
    return images.float().sub_(low).mul_(scale).clamp_(0, 255).to(torch.uint8)


def equalize(images: Tensor, _: Tensor, counted: Tensor | None = None) -> Tensor:
    """Equalize each channel by its histogram in `counted` (default: the images)."""
    channels = (images if counted is None else counted).flatten(0, 1).flatten(1)  # (batch x 3, pixels)
    counts = _frequencies(channels)
    levels = torch.arange(LEVELS, device=images.device)
    last = (levels * (counts > 0)).amax(dim=1, keepdim=True)  # (batch x 3, 1) largest value
    step = (channels.shape[1] - counts.gather(1, last)) // (LEVELS - 1)
    before = counts.cumsum(dim=1) - counts
    table = (step // 2 + before) // step.clamp(min=1)
    table = torch.where(step > 0, table.clamp(max=255), levels)  # (batch x 3, 256)
    return table.to(torch.uint8).gather(1, images.flatten(0, 1).flatten(1).long()).view(images.shape)


def _frequencies(channels: Tensor) -> Tensor:
    """Return histograms (channels, 256) of uint8 channels (channels, pixels)."""
    if channels.device.type == "cpu":  # ten times as fast; on a GPU it would synchronise
        return torch.stack([torch.bincount(channel, minlength=LEVELS) for channel in channels])
    values = channels.long()
    counts = torch.zeros(len(channels), LEVELS, dtype=torch.long, device=channels.device)
    return counts.scatter_add_(1, values, torch.ones_like(values))


def invert(images: Tensor, _: Tensor) -> Tensor:
    """Replace each value by 255 minus it."""
    return 255 - images


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the leading bits; with 0 bits the image is black."""
    mask = 256 - 2 ** (8 - bits)  # (batch,)
    return images & mask.to(torch.uint8).view(-1, 1, 1, 1)


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Invert values from the threshold up."""
    lowest = thresholds.to(torch.int16).view(-1, 1, 1, 1)  # up to 256, which inverts nothing
    return images ^ (images >= lowest).to(torch.uint8).mul_(255)


def solarize_add(images: Tensor, amounts: Tensor) -> Tensor:
    """Add the amount to values below 128."""
    # No overflow: amounts are at most 128.
    return images + (images < LEVELS // 2) * amounts.to(torch.uint8).view(-1, 1, 1, 1)


def brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with black; a factor of 1 changes nothing, as in the following three."""
    return _blend(torch.zeros((), device=images.device), images, factors)


def contrast(images: Tensor, factors: Tensor, counted: Tensor | None = None) -> Tensor:
    """Blend with the mean gray of `counted` (default: the images)."""
    mean = _gray(images if counted is None else counted).mean(dim=(1, 2, 3))
    mean = (mean + 0.5).floor().view(-1, 1, 1, 1)
    return _blend(mean, images, factors)


def color(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with the grayscale image."""
    return _blend(_gray(images), images, factors)


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with a smoothed image; the outermost pixels are not changed."""
    pixels = images.float()
    across = pixels[..., :-2] + pixels[..., 1:-1] + pixels[..., 2:]
    around = across[..., :-2, :] + across[..., 1:-1, :] + across[..., 2:, :]  # 3 x 3 pixels, summed
    smooth = pixels.clone()
    # Pillow's kernel: 5 at the centre and 1 for the eight neighbors, over 13.
    smooth[..., 1:-1, 1:-1] = around.add_(pixels[..., 1:-1, 1:-1], alpha=4).div_(13).add_(0.5).floor_()
    return _blend(smooth, images, factors)


def _gray(images: Tensor) -> Tensor:
    red, green, blue = images.to(torch.int32).unbind(dim=1)
    weighted = GRAY_WEIGHTS[0] * red + GRAY_WEIGHTS[1] * green + GRAY_WEIGHTS[2] * blue
    return ((weighted + 2**15) >> 16).float().unsqueeze(1)  # (batch, 1, height, width)


def _blend(other: Tensor, images: Tensor, factors: Tensor) -> Tensor:
    blended = images.float().sub_(other).mul_(factors.view(-1, 1, 1, 1)).add_(other)
    return blended.clamp_(0, 255).to(torch.uint8)
