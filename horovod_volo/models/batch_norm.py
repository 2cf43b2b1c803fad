"""BatchNorm followed by ReLU in the stem: on a GPU one operator on channels-last images, in training."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.kernels import runs_kernels
from horovod_volo.kernels.batch_norm import batch_norm_relu


class BatchNormReLU(nn.BatchNorm2d):
    """torch's BatchNorm2d, then ReLU."""

    def forward(self, images: Tensor) -> Tensor:
        """Return images of the same shape."""
        if not (self.training and self.affine and self.running_mean is not None and runs_kernels(images)):
            return F.relu(super().forward(images), inplace=True)
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return batch_norm_relu(images, self)


def merge_relus(layers: nn.Sequential) -> None:
    """Make each BatchNorm2d of a sequence and the ReLU that follows it one module; names do not change."""
    for number, (norm, relu) in enumerate(pairwise(layers)):
        if type(norm) is nn.BatchNorm2d and isinstance(relu, nn.ReLU):
            norm.__class__ = BatchNormReLU
            layers[number + 1] = nn.Identity()


def stem_input(images: Tensor, *, training: bool) -> Tensor:
    """Return the images in the memory format and dtype that the stem's first convolution reads."""
    if not (training and (images.device.type == "cpu" or runs_kernels(images))):
        return images
    # The convolutions of CPUs and of Hopper are channels-last; others would be transposed before and after.
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else images.dtype
    return images.to(dtype, memory_format=torch.channels_last)
