"""The images as the stem's first convolution reads them."""

from __future__ import annotations

import torch
from torch import Tensor


def stem_input(images: Tensor, *, training: bool) -> Tensor:
    """Return the images in channels-last memory in training, and under CUDA's autocast in its dtype.

    The convolutions of CPUs and of GPUs with tensor cores are channels-last: they would transpose others.
    """
    if not training:
        return images
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else images.dtype
    return images.to(dtype, memory_format=torch.channels_last)
