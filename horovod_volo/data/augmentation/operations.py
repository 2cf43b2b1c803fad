"""The table of augmentation operations: name, argument for a magnitude, function and kind of each.

Invariant: an operation's number and the contents and order of a published list such as RAND_V1 never change.
A new operation gets a new number and appears in a new list only, so existing runs draw what they drew.
"""

from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from horovod_volo.data.augmentation import color_ops, geometric_ops

Floats = NDArray[np.float64]
Argument = Callable[[Floats, Floats, bool], Floats]  # (level from 0 to 1, sign -1 or 1, increasing)
Function = Callable[..., Tensor]


class Kind(Enum):
    """What an operation does, and so what its function is given besides the images."""

    GEOMETRIC = auto()  # moves pixels: (images, matrices, shape, bicubic=)
    COLOR = auto()  # maps pixels: (images, arguments)
    HISTOGRAM = auto()  # maps pixels by an image's statistics: (images, arguments, images to count)


class Operation(int):
    """One entry of the table; as an integer, the number by which a drawn batch refers to it."""

    name: str  # timm's
    kind: Kind
    argument: Argument
    function: Function
    matrices: geometric_ops.Matrices | None  # of a geometric operation
    neighbors: int  # pixels that the function reads on each side of a pixel

    def __new__(
        cls,
        number: int,
        name: str,
        kind: Kind,
        argument: Argument,
        function: Function,
        *,
        matrices: geometric_ops.Matrices | None = None,
        neighbors: int = 0,
    ) -> Self:
        """Make an entry; it is not in the table yet."""
        entry = super().__new__(cls, number)
        entry.name, entry.kind, entry.argument, entry.function = name, kind, argument, function
        entry.matrices, entry.neighbors = matrices, neighbors
        return entry


def no_argument(level: Floats, sign: Floats, increasing: bool) -> Floats:  # noqa: ARG001
    """Return the argument of an operation that has none."""
    return np.zeros_like(level)


def _bits(level: Floats, sign: Floats, increasing: bool) -> Floats:  # noqa: ARG001
    bits = np.floor(4 * level)
    return (4 - bits if increasing else bits).clip(0, 8)


def _threshold(level: Floats, sign: Floats, increasing: bool) -> Floats:  # noqa: ARG001
    threshold = np.minimum(256, np.floor(256 * level))
    return 256 - threshold if increasing else threshold


def _amount(level: Floats, sign: Floats, increasing: bool) -> Floats:  # noqa: ARG001
    return np.minimum(128, np.floor(110 * level))


def _factor(level: Floats, sign: Floats, increasing: bool) -> Floats:
    return np.maximum(0.1, 1 + sign * 0.9 * level) if increasing else 1.8 * level + 0.1


def _geometric(
    number: int, name: str, largest: float, function: Function, matrices: geometric_ops.Matrices
) -> Operation:
    def signed(level: Floats, sign: Floats, increasing: bool) -> Floats:  # noqa: ARG001
        return sign * largest * level

    return Operation(number, name, Kind.GEOMETRIC, signed, function, matrices=matrices)


NONE = 0
# RandAugment as timm has it and as the published runs used it. Draws are indices into this list.
RAND_V1 = (
    AUTO_CONTRAST := Operation(1, "AutoContrast", Kind.HISTOGRAM, no_argument, color_ops.auto_contrast),
    EQUALIZE := Operation(2, "Equalize", Kind.HISTOGRAM, no_argument, color_ops.equalize),
    INVERT := Operation(3, "Invert", Kind.COLOR, no_argument, color_ops.invert),
    ROTATE := _geometric(4, "Rotate", 30, geometric_ops.rotate, geometric_ops.rotations),
    POSTERIZE := Operation(5, "Posterize", Kind.COLOR, _bits, color_ops.posterize),
    SOLARIZE := Operation(6, "Solarize", Kind.COLOR, _threshold, color_ops.solarize),
    SOLARIZE_ADD := Operation(7, "SolarizeAdd", Kind.COLOR, _amount, color_ops.solarize_add),
    COLOR := Operation(8, "Color", Kind.COLOR, _factor, color_ops.color),
    CONTRAST := Operation(9, "Contrast", Kind.HISTOGRAM, _factor, color_ops.contrast),
    BRIGHTNESS := Operation(10, "Brightness", Kind.COLOR, _factor, color_ops.brightness),
    SHARPNESS := Operation(11, "Sharpness", Kind.COLOR, _factor, color_ops.sharpness, neighbors=1),
    SHEAR_X := _geometric(12, "ShearX", 0.3, geometric_ops.warp_along_x, geometric_ops.shears_x),
    SHEAR_Y := _geometric(13, "ShearY", 0.3, geometric_ops.warp_along_y, geometric_ops.shears_y),
    TRANSLATE_X := _geometric(
        14, "TranslateXRel", 0.45, geometric_ops.warp_along_x, geometric_ops.translations_x
    ),
    TRANSLATE_Y := _geometric(
        15, "TranslateYRel", 0.45, geometric_ops.warp_along_y, geometric_ops.translations_y
    ),
)
OPERATIONS: dict[int, Operation] = {int(each): each for each in RAND_V1}  # by number
GEOMETRIC = tuple(each for each in OPERATIONS.values() if each.kind is Kind.GEOMETRIC)


def source_matrices(
    kinds: NDArray[np.int64], arguments: NDArray[np.float32], sizes: NDArray[Any]
) -> NDArray[np.float64]:
    """Return the matrix of one operation for each image, (batch, 2, 3).

    `kinds` and `arguments` are (batch,), `sizes` (batch, 2) height and width. An operation that is not
    geometric has the identity.
    """
    matrices = np.tile(np.eye(2, 3), (len(kinds), 1, 1))
    for number in set(kinds.tolist()) - {NONE}:
        make = OPERATIONS[number].matrices
        if make is not None:
            rows = kinds == number
            matrices[rows] = make(arguments[rows].astype(np.float64), sizes[rows, ::-1].astype(np.float64))
    return matrices
