"""Applies drawn operations to a batch of crops, on the device where they are.

On a GPU a kernel may apply a layer of operations to the whole batch (core/operators.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from horovod_volo.core.batch import copy_async
from horovod_volo.core.operators import kernel_of
from horovod_volo.data.augmentation.operations import NONE, OPERATIONS, Kind, source_matrices
from horovod_volo.data.augmentation.rand_augment import Mixing, Operations

Groups = dict[tuple[Any, bool | None], list[int]]  # rows of a batch by function and interpolation


def augment_(images: Tensor, operations: Operations) -> None:
    """Change uint8 images (batch, 3, image_size, image_size) in place, one layer after the other.

    The operations are on the host, so nothing here waits for the device.
    """
    if operations.mixing is not None:
        _mix_chains(images, operations, operations.mixing)
        return
    kernels = kernel_of("augmentation", images)
    if kernels is not None:
        kernels.augment_(images, operations)
        return
    for layer in range(operations.kinds.shape[1]):
        apply_groups(images, operations, layer, groups_of(operations, layer))


def _mix_chains(images: Tensor, operations: Operations, mixing: Mixing) -> None:
    """Mix what the chains of AugMix make of the images, and blend it with them, rounding as Pillow does."""
    weights = copy_async(mixing.weights, images.device)[..., None, None, None]  # (batch, chains, 1, 1, 1)
    mixture = torch.zeros_like(images, dtype=torch.float32)
    for number, chain in enumerate(operations.chains()):
        changed = images.clone()
        augment_(changed, chain)
        mixture.addcmul_(changed.float(), weights[:, number])
    before = images.float()
    shares = copy_async(mixing.shares, images.device).view(-1, 1, 1, 1)
    blended = mixture.clamp_(0, 255).floor_().sub_(before).mul_(shares).add_(before)
    images.copy_(blended.to(torch.uint8))


def apply_groups(images: Tensor, operations: Operations, layer: int, groups: Groups) -> None:
    """Apply each function to the images for which it was drawn."""
    kinds, arguments = operations.kinds[:, layer], operations.arguments[:, layer]
    shape = (images.shape[-2], images.shape[-1])
    views = images.unbind()
    for (function, bicubic), rows in groups.items():
        # On a CPU, indexing would cost as much as some operations.
        chosen = (
            images[rows[0] : rows[0] + 1] if len(rows) == 1 else torch.stack([views[row] for row in rows])
        )
        if bicubic is None:
            changed = function(chosen, copy_async(arguments[rows], images.device))
        else:
            matrices = source_matrices(kinds[rows], arguments[rows], np.tile(shape, (len(rows), 1)))
            changed = function(chosen, matrices, shape, bicubic=bicubic)
        for row, image in zip(rows, changed.unbind(), strict=True):
            views[row].copy_(image)


def groups_of(operations: Operations, layer: int) -> Groups:
    """Return the images for each function and interpolation; the latter is None unless it is geometric."""
    kinds, bicubic = operations.kinds[:, layer], operations.bicubic[:, layer]
    groups: Groups = {}
    for row, (kind, is_bicubic) in enumerate(zip(kinds.tolist(), bicubic.tolist(), strict=True)):
        if kind != NONE:
            operation = OPERATIONS[kind]
            interpolation = is_bicubic if operation.kind is Kind.GEOMETRIC else None
            groups.setdefault((operation.function, interpolation), []).append(row)
    return groups
