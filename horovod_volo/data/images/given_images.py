"""A list of images from a data set in memory: anything indexable that gives an image and a label.

Images reach the decoder as bytes: those of a file unchanged, pixels as PPM. Order, augmentation and damaged
samples are then the same as of files.
Invariant: the digest follows from the labels, the classes and the name that the user gives the data set.
Pixels are not in it, because that would read the whole set at each start.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from horovod_volo.core.errors import BadSampleError, UserError, error_and_place
from horovod_volo.data.images import catalog_file
from horovod_volo.data.images.catalog import ImageList
from horovod_volo.data.images.catalog_file import Label
from horovod_volo.data.images.split_folder import Part, shortened
from horovod_volo.data.reading import UNDECODABLE, Encoded, to_ppm

# What a data set raises for a damaged image. Any other error is one of its code.
_DAMAGE = (OSError, EOFError, SyntaxError, ValueError)
_LABEL_NAMES = ("label", "labels", "class", "target")
_IMAGE_NAMES = ("image", "img")
_WANTED = "the bytes of an image file, a path, a PIL image, or an array (height, width, 3) of uint8"


class SampleSequence(Protocol):
    """A data set of yours: anything with a length that gives (image, label) for a position.

    The image is the bytes of an image file, a path, a PIL image, or an array (height, width, 3) or (height,
    width) of uint8. The label is the number of a class, or its name. Two attributes are used if they are
    there: `classes`, the names of the classes, and `targets`, the labels of all samples; without `targets`,
    the start reads every sample once for its label. Samples are read by several threads.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]: ...


class Numbering(NamedTuple):
    """The names of the classes, and the class number of each label."""

    classes: tuple[str, ...]
    number_of: dict[Label, int]

    def numbers(self, labels: Sequence[Label], source: str) -> NDArray[np.int32]:
        """Return the class numbers of labels; raise UserError for a label of no class."""
        unknown = sorted({str(label) for label in labels if label not in self.number_of})
        if unknown:
            raise UserError(
                f"the {source} has labels of no class: {shortened(unknown)}. The classes are "
                f"{shortened(self.classes)}."
            )
        return np.array([self.number_of[label] for label in labels], np.int32)


class GivenImages(ImageList):
    """Samples of a data set, as a list of images."""

    def __init__(
        self,
        samples: SampleSequence,
        positions: NDArray[np.int64],
        labels: Sequence[Label],
        numbering: Numbering,
        *,
        source: str,
        identity: str,
    ) -> None:
        """Take the samples at `positions`; `labels` are those of all samples."""
        self.source = source
        self.classes = numbering.classes
        self.targets = numbering.numbers([labels[position] for position in positions.tolist()], source)
        self._samples, self._positions = samples, positions
        facts = json.dumps([identity, len(samples), self.classes]).encode()
        content = positions.astype("<i8").tobytes() + self.targets.astype("<i4").tobytes()
        self.digest = hashlib.sha256(facts + content).hexdigest()

    def __len__(self) -> int:
        return len(self._positions)

    def name(self, index: int) -> str:
        """Return "CLASS/NUMBER"."""
        return f"{self.classes[self.targets[index]]}/{self._positions[index]:08}"

    def location(self, index: int) -> str:
        """Return the position of a sample in the data set, for messages."""
        return f"sample {self._positions[index]} of the {self.source}"

    def read(self, index: int) -> Encoded:
        """Return the encoded image; raise BadSampleError if it cannot be read, UserError if it is none."""
        try:
            sample = self._samples[int(self._positions[index])]
        except _DAMAGE as error:
            raise BadSampleError(f"{self.location(index)} cannot be read: {error}") from error
        except Exception as error:  # the code of the data set may raise anything
            raise _failed(self.location(index), error) from error
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise UserError(f"{self.location(index)} is {_described(sample)}, not a pair (image, label).")
        return _encoded(sample[0], self.location(index))


class LooseImages:
    """Images without labels, to be read like those of a list."""

    def __init__(self, images: Sequence[Any]) -> None:
        self._images = images

    def location(self, index: int) -> str:
        """Return the path of an image, or its position, for messages."""
        image = self._images[index]
        return str(image) if isinstance(image, str | os.PathLike) else f"image {index}"

    def read(self, index: int) -> Encoded:
        """Return the encoded image; raise BadSampleError if it cannot be read, UserError if it is none."""
        return _encoded(self._images[index], self.location(index))


def _encoded(image: Any, location: str) -> Encoded:
    """Return an image as the bytes of a file; pixels become PPM."""
    try:
        if isinstance(image, str | os.PathLike):
            image = Path(image).read_bytes()
        if isinstance(image, bytes | bytearray | memoryview):
            found = np.frombuffer(image, dtype=np.uint8)
        elif isinstance(image, Image.Image):
            found = to_ppm(image)
        else:
            found = _encoded_pixels(image, location)
    except UNDECODABLE as error:
        raise BadSampleError(f"{location} cannot be read: {error}") from error
    if not len(found):
        raise BadSampleError(f"{location} is empty")
    return found


def _encoded_pixels(image: Any, location: str) -> Encoded:
    pixels = np.asarray(image)
    if pixels.dtype != np.uint8 or not (pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3))):
        raise UserError(f"the image of {location} is {_described(image)}, not {_WANTED}.")
    if not pixels.size:
        raise ValueError("it has no pixels")
    plane = pixels[..., 0] if pixels.shape[2:] == (1,) else np.ascontiguousarray(pixels)
    return to_ppm(Image.fromarray(plane))


class HuggingFaceSamples:
    """The samples of a data set with a column of images and one of classes."""

    def __init__(self, dataset: Any) -> None:
        import datasets

        if isinstance(dataset, dict):
            raise UserError(
                f"this is a DatasetDict of {shortened(sorted(dataset))}, not one data set. Give one of them, "
                f"as train=dataset[{min(dataset)!r}]."
            )
        if not isinstance(dataset, datasets.Dataset):
            raise UserError(
                f"a {type(dataset).__name__} has no length and no positions, so it has no order to resume. "
                "Load it without streaming=True."
            )
        features = dataset.features
        images = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
        images = images or [name for name in _IMAGE_NAMES if name in features]
        labels = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
        labels = labels or [name for name in _LABEL_NAMES if name in features]
        self._image, self._label = _one_of(images, "images", features), _one_of(labels, "classes", features)
        kind = features[self._label]
        if isinstance(kind, datasets.ClassLabel):
            self.classes: tuple[str, ...] = tuple(kind.names)
        if isinstance(features[self._image], datasets.Image):
            dataset = dataset.cast_column(self._image, datasets.Image(decode=False))
        self.targets = dataset.with_format(None).select_columns([self._label])[:][self._label]
        self._rows = dataset.with_format(None).select_columns([self._image])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """Return an image, as stored, and its class."""
        image = self._rows[index][self._image]
        if isinstance(image, dict):
            image = image["path"] if image["bytes"] is None else image["bytes"]
        return image, self.targets[index]


def is_hugging_face(dataset: object) -> bool:
    """Return whether a data set is of `datasets`, which is then installed."""
    return any(kind.__module__.partition(".")[0] == "datasets" for kind in type(dataset).__mro__)


def _one_of(columns: list[str], what: str, features: Any) -> str:
    if len(columns) == 1:
        return columns[0]
    found = f"{len(columns)} columns of {what} ({', '.join(columns)})" if columns else f"no column of {what}"
    raise UserError(
        f"the data set has {found} among {', '.join(features)}. Keep one column of images and one of "
        "classes, with select_columns; rename_column can call it `label`."
    )


def read_labels(samples: SampleSequence, source: str, progress: Callable[[int, int], object]) -> list[Label]:
    """Return the labels of all samples: its `targets`, else those of every sample, which are read once."""
    count = len(samples)
    if not count:
        raise UserError(f"the {source} has no samples.")
    targets = getattr(samples, "targets", None)
    if targets is not None:
        if len(targets) != count:
            raise UserError(f"the {source} has {count} samples, but {len(targets)} `targets`.")
        return [_label(target, number, source) for number, target in enumerate(targets)]
    labels = []
    for number in range(count):
        try:
            _, target = samples[number]
        except Exception as error:  # a label cannot be replaced, whatever is wrong
            raise _failed(f"sample {number} of the {source}", error) from error
        labels.append(_label(target, number, source))
        progress(number + 1, count)
        catalog_file.note_progress()
    return labels


def number_labels(labels: Sequence[Label], classes: Sequence[str] | None, source: str) -> Numbering:
    """Number the classes: by their position in `classes`, if they are named, else in order."""
    if classes is not None:
        names = tuple(map(str, classes))
        if len(set(names)) < len(names):
            raise UserError(f"the `classes` of the {source} name a class twice.")
        by_name: dict[Label, int] = {name: number for number, name in enumerate(names)}
        return Numbering(names, by_name | {number: number for number in range(len(names))})
    kinds = {type(label) for label in labels}
    if len(kinds) > 1:
        raise UserError(f"the {source} has numbers and names as labels. Use one of them.")
    ordered = sorted(set(labels))
    # Padded with zeros, so that the order of the names is that of the numbers.
    digits = len(str(ordered[-1])) if kinds == {int} else 0
    return Numbering(
        tuple(f"{label:0{digits}d}" if isinstance(label, int) else label for label in ordered),
        {label: number for number, label in enumerate(ordered)},
    )


def held_out_positions(
    labels: Sequence[Label], share: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the positions of training samples and of held-out ones: a share of each class, by the seed."""
    by_class: dict[Label, list[str]] = {}
    for position, label in enumerate(labels):
        by_class.setdefault(label, []).append(f"{position:08}")
    drawn = {
        int(name)
        for label, names in by_class.items()
        for name in Part(share, seed, True).of(str(label), names)
    }
    held_out = np.array(sorted(drawn), np.int64)
    return np.setdiff1d(np.arange(len(labels), dtype=np.int64), held_out), held_out


def _label(target: Any, number: int, source: str) -> Label:
    if isinstance(target, str):
        return target
    try:
        label = operator.index(target)
    except TypeError:
        label = -1
    if label < 0:
        raise UserError(
            f"the label of sample {number} of the {source} is {_described(target)}, not the number of a "
            "class, from 0, or its name."
        )
    return label


def _failed(what: str, error: Exception) -> UserError:
    return UserError(f"{what} failed with {error_and_place(error)}. Correct the data set.")


def _described(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)} and {value.dtype}" if hasattr(value, "shape") else ""
    return f"{type(value).__name__}{shape or f' {value!r}'[:60]}"
