"""Applies drawn operations to a batch of crops, on the device where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.core.batch import copy_async
from horovod_volo.data.augmentation.operations import NONE, OPERATIONS, Kind, source_matrices
from horovod_volo.data.augmentation.rand_augment import Operations


def augment_(images: Tensor, operations: Operations) -> None:
    """Change uint8 images (batch, 3, image_size, image_size) in place, one layer after the other.

    The operations are on the host, so nothing here waits for the device.
    """
    shape = (images.shape[-2], images.shape[-1])
    for layer in range(operations.kinds.shape[1]):
        kinds, arguments = operations.kinds[:, layer], operations.arguments[:, layer]
        for (function, bicubic), rows in _groups(kinds, operations.bicubic[:, layer]).items():
            # On the CPU a batch is one image: a view of it, because indexing would cost as much as some
            # operations.
            at = slice(rows[0], rows[0] + 1) if len(rows) == 1 else copy_async(np.array(rows), images.device)
            if bicubic is None:
                images[at] = function(images[at], copy_async(arguments[rows], images.device))
            else:
                matrices = source_matrices(kinds[rows], arguments[rows], np.tile(shape, (len(rows), 1)))
                images[at] = function(images[at], matrices, shape, bicubic=bicubic)


def _groups(kinds: NDArray[np.int64], bicubic: NDArray[np.bool_]) -> dict[tuple[Any, bool | None], list[int]]:
    """Return the images for each function and interpolation; the latter is None unless it is geometric."""
    groups: dict[tuple[Any, bool | None], list[int]] = {}
    for row, (kind, is_bicubic) in enumerate(zip(kinds.tolist(), bicubic.tolist(), strict=True)):
        if kind != NONE:
            operation = OPERATIONS[kind]
            interpolation = is_bicubic if operation.kind is Kind.GEOMETRIC else None
            groups.setdefault((operation.function, interpolation), []).append(row)
    return groups
