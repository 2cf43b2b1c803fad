"""Carries out the drawn operations on a batch of cut images, on the device they lie on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.data import recolour
from horovod_volo.data.moving import move, source_matrices
from horovod_volo.data.rand_augment import GEOMETRIC, Operation, Operations

_RECOLOURING: dict[Operation, Callable[[Tensor, Tensor], Tensor]] = {
    Operation.AUTO_CONTRAST: recolour.auto_contrast,
    Operation.EQUALIZE: recolour.equalize,
    Operation.INVERT: recolour.invert,
    Operation.POSTERIZE: recolour.posterize,
    Operation.SOLARIZE: recolour.solarize,
    Operation.SOLARIZE_ADD: recolour.solarize_add,
    Operation.COLOR: recolour.color,
    Operation.CONTRAST: recolour.contrast,
    Operation.BRIGHTNESS: recolour.brightness,
    Operation.SHARPNESS: recolour.sharpness,
}


def augment_(images: Tensor, operations: Operations) -> None:
    """Change uint8 images (batch, 3, side, side) in place, one layer of operations after the other.

    What is to be done is known on the host, so nothing here waits for the device.
    """
    for layer in range(operations.kinds.shape[1]):
        kinds, arguments = operations.kinds[:, layer], operations.arguments[:, layer]
        for kind, change in _RECOLOURING.items():
            rows = np.flatnonzero(kinds == kind)
            if len(rows):
                at = _on(images, rows)
                images[at] = change(images[at], _on(images, arguments[rows]))
        for bicubic in (False, True):
            rows = np.flatnonzero(np.isin(kinds, GEOMETRIC) & (operations.bicubic[:, layer] == bicubic))
            if len(rows):
                at = _on(images, rows)
                matrices = source_matrices(kinds[rows], arguments[rows], images.shape[-1])
                images[at] = move(images[at], matrices, bicubic=bicubic)


def _on(images: Tensor, values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values).to(images.device, non_blocking=True)
