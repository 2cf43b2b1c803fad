"""Carries out the drawn operations on a batch of cut images, on the device they lie on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.data.augmentation import color_ops
from horovod_volo.data.augmentation.geometric_ops import shift_columns, shift_rows, source_matrices, turn
from horovod_volo.data.augmentation.rand_augment import Operation, Operations

Change = Callable[..., Tensor]

# These count the colours of an image, or of another one given besides.
HISTOGRAM_OPS: dict[int, Change] = {
    Operation.AUTO_CONTRAST: color_ops.auto_contrast,
    Operation.EQUALIZE: color_ops.equalize,
    Operation.CONTRAST: color_ops.contrast,
}

COLOR_OPS: dict[int, Change] = HISTOGRAM_OPS | {
    Operation.INVERT: color_ops.invert,
    Operation.POSTERIZE: color_ops.posterize,
    Operation.SOLARIZE: color_ops.solarize,
    Operation.SOLARIZE_ADD: color_ops.solarize_add,
    Operation.COLOR: color_ops.color,
    Operation.BRIGHTNESS: color_ops.brightness,
    Operation.SHARPNESS: color_ops.sharpness,
}


GEOMETRIC_OPS: dict[int, Change] = {
    Operation.ROTATE: turn,
    Operation.SHEAR_X: shift_columns,
    Operation.SHEAR_Y: shift_rows,
    Operation.TRANSLATE_X: shift_columns,
    Operation.TRANSLATE_Y: shift_rows,
}


def augment_(images: Tensor, operations: Operations) -> None:
    """Change uint8 images (batch, 3, side, side) in place, one layer of operations after the other.

    What is to be done is known on the host, so nothing here waits for the device.
    """
    for layer in range(operations.kinds.shape[1]):
        kinds, arguments = operations.kinds[:, layer], operations.arguments[:, layer]
        for (change, bicubic), rows in _alike(kinds, operations.bicubic[:, layer]).items():
            # A view of a single image, as on the CPU: picking rows costs as much as many a change.
            at = slice(rows[0], rows[0] + 1) if len(rows) == 1 else _on(images, np.array(rows))
            if bicubic is None:
                images[at] = change(images[at], _on(images, arguments[rows]))
            else:
                shape = (images.shape[-2], images.shape[-1])
                matrices = source_matrices(kinds[rows], arguments[rows], np.tile(shape, (len(rows), 1)))
                images[at] = change(images[at], matrices, shape, bicubic=bicubic)


def _alike(kinds: NDArray[np.int64], bicubic: NDArray[np.bool_]) -> dict[tuple[Any, bool | None], list[int]]:
    """Return which images undergo the same change: (how they are recoloured, None) or (moved, bicubic)."""
    alike: dict[tuple[Any, bool | None], list[int]] = {}
    for row, (kind, finely) in enumerate(zip(kinds.tolist(), bicubic.tolist(), strict=True)):
        if kind in COLOR_OPS:
            alike.setdefault((COLOR_OPS[kind], None), []).append(row)
        elif kind in GEOMETRIC_OPS:
            alike.setdefault((GEOMETRIC_OPS[kind], finely), []).append(row)
    return alike


def _on(images: Tensor, values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(values).to(images.device, non_blocking=True)
