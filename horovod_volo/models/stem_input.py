"""The images as the stem's first convolution reads them."""

from __future__ import annotations

import torch
from torch import Tensor


def stem_input(images: Tensor, *, training: bool) -> Tensor:
    """Return the images in channels-last memory in training on a GPU, and under autocast in its dtype.

    Convolutions on tensor cores are channels-last: they would transpose others. On a CPU, batch norm in that
    memory sums in fp32 one by one, which costs three digits of its gradients.
    """
    if not training or images.device.type == "cpu":
        return images
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else images.dtype
    return images.to(dtype, memory_format=torch.channels_last)
