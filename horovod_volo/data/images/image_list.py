"""What training and evaluation need of a list of images, and what a data set of one's own looks like.

A `Catalog` of files or shards and `GivenImages` of a data set in memory are both an `ImageList`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Label = int | str  # class number or name


class ImageList(ABC):
    """The images of a split, in a fixed order, with their classes."""

    classes: tuple[str, ...]
    targets: NDArray[np.int32]  # (images,) positions in `classes`
    digest: str  # identifies the images and their order: a resumed run must share it
    source: str  # where the images are, for messages

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """Return "CLASS/NAME", which is unique."""

    @abstractmethod
    def location(self, index: int) -> str:
        """Return where an image is, for messages."""

    @abstractmethod
    def read(self, index: int) -> NDArray[np.uint8]:
        """Return the encoded image; raise BadSampleError if it cannot be read. Thread-safe."""

    def read_ahead(self, indices: NDArray[np.int64]) -> None:  # noqa: B027  # most lists have no need of it
        """Begin to read images that are needed soon, if that saves time."""

    def number_as(self, classes: tuple[str, ...]) -> None:
        """Number the classes by their positions among `classes`, which has all of them."""
        number_of = {name: number for number, name in enumerate(classes)}
        numbers = np.array([number_of[name] for name in self.classes], np.int32)
        self.targets, self.classes = numbers[self.targets], classes

    def close(self) -> None:  # noqa: B027
        """Close all files."""


class SampleSequence(Protocol):
    """A data set of yours: anything with a length that gives (image, label) for a position.

    The image is the bytes of an image file, a path, a PIL image, or an array (height, width, 3) or (height,
    width) of uint8. The label is the number of a class, or its name. Two attributes are used if they are
    there: `classes`, the names of the classes, and `targets`, the labels of all samples; without `targets`,
    the start reads every sample once for its label. Samples are read by several threads.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...
