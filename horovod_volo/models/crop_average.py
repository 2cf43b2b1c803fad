"""A network that predicts an image from several crops of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class CropAverage(nn.Module):
    """Averages the class probabilities of the crops of each image."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        """Return the logarithm of the mean probabilities (batch, classes).

        images  (batch, crops, 3, height, width)
        """
        # One crop of all images after the other, so that crops need no more memory.
        crops = [self.network(crop).float().log_softmax(dim=1) for crop in images.unbind(dim=1)]
        return torch.stack(crops).logsumexp(dim=0) - math.log(len(crops))
