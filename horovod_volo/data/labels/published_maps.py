"""The dense label maps of training images, read in their published form.

One file for each image: `<root>/<class>/<image name up to its first dot>.pt`, a tensor saved by
torch of shape [2, k, height, width]: the k highest raw logits of each cell, then their class
numbers. The maps describe the stored image: whoever turns the image must turn its map. Which part of it
they cover, `<root>/map_geometry.txt` may tell; else it is assumed.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.core.errors import UserError
from horovod_volo.data.bad_samples import BadSampleError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.geometry import MapGeometry, assumed_geometry
from horovod_volo.data.labels.keys import key_of

Scores = NDArray[np.float16]  # (k, height, width)
Ids = NDArray[np.integer[Any]]  # (k, height, width)

# Every whole number below is exact in half precision, in which the published maps keep class numbers.
EXACT_IN_HALF = 2048
MAPS_TRIED = 64
GEOMETRY_FILE = "map_geometry.txt"


class PublishedMaps:
    """A folder of label maps, one file for each image of a catalog."""

    def __init__(self, root: str | Path, catalog: Catalog) -> None:
        self._root = Path(root)
        self._catalog = catalog
        self._check_classes()
        places = np.linspace(0, len(catalog) - 1, MAPS_TRIED).round().astype(np.int64).tolist()
        self.size = first_size([self._path(place) for place in dict.fromkeys(places)], len(catalog.classes))
        self.geometry, self.geometry_assumed = geometry_of(self._root, self.size)
        self.recorded_geometry = None if self.geometry_assumed else self.geometry

    def read(self, index: int) -> tuple[Scores, Ids]:
        """Return the scores and class numbers of an image, (k, height, width) each."""
        path = self._path(index)
        scores, ids = read_published_map(path, len(self._catalog.classes))
        if scores.shape != self.size:
            raise BadSampleError(
                f"the label map {path} has the shape {scores.shape}, the others have {self.size}"
            )
        return scores, ids

    def close(self) -> None:
        """Nothing is kept open between reads."""

    def _path(self, index: int) -> str:
        # As text: a Path keeps every name it has seen in the interpreter's table of strings.
        return f"{self._root}/{key_of(self._catalog.name(index))}.pt"

    def _check_classes(self) -> None:
        """Refuse a folder that has no map for any image of some class."""
        targets = self._catalog.targets
        present, firsts = np.unique(targets, return_index=True)
        for target, first in zip(present.tolist(), firsts.tolist(), strict=True):
            if Path(self._path(first)).is_file():
                continue
            if not any(Path(self._path(int(index))).is_file() for index in np.flatnonzero(targets == target)):
                raise UserError(
                    f"there is no label map {self._path(first)}, nor one of any other image of class "
                    f"{self._catalog.classes[target]}. --token-label-data names a packed store, or the "
                    "folder that holds CLASS/IMAGE.pt for every training image; make the missing maps, or "
                    "drop --token-label-data to train every token on the image's class."
                )


def geometry_of(root: Path, size: tuple[int, int, int]) -> tuple[MapGeometry, bool]:
    """Return what the maps in a folder cover, and whether that is only assumed."""
    path = root / GEOMETRY_FILE
    try:
        return MapGeometry.parse(path.read_text(encoding="utf-8").strip()), False
    except FileNotFoundError:
        return assumed_geometry(*size[1:]), True
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}. Mend or remove it.") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def first_size(paths: Iterable[str | Path], classes: int) -> tuple[int, int, int]:
    """Return k, height and width of the first of these maps that can be used: what all must have."""
    first_problem = ""
    for path in paths:
        try:
            scores, _ = read_published_map(path, classes)
        except BadSampleError as problem:
            first_problem = first_problem or str(problem)
            continue
        top, height, width = scores.shape
        return top, height, width
    raise UserError(
        f"none of the label maps tried can be used; the first: {first_problem}. Name the folder of the maps "
        "that were made for these images and classes."
    )


def read_published_map(path: str | Path, classes: int) -> tuple[Scores, Ids]:
    """Read one file; raise BadSampleError unless it holds logits and numbers of `classes` classes."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise BadSampleError(f"there is no label map {path}") from None
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise BadSampleError(f"the label map {path} cannot be read: {reason}") from None
    scores, ids = _unpacked(stored, path)
    if ids.max() >= classes:
        raise BadSampleError(
            f"the label map {path} names class {ids.max()}, but there are {classes} classes: "
            "it was made for others"
        )
    if isinstance(stored, torch.Tensor) and stored.dtype == torch.half and ids.max() >= EXACT_IN_HALF:
        raise BadSampleError(
            f"the label map {path} keeps class numbers from {EXACT_IN_HALF} on in half precision, which "
            "rounds them: it must be generated anew"
        )
    return scores, ids


def flipped(scores: Scores, ids: Ids, horizontal: bool, vertical: bool) -> tuple[Scores, Ids]:
    """Flip a map as its image is flipped."""
    turn = (slice(None), slice(None, None, -1 if vertical else 1), slice(None, None, -1 if horizontal else 1))
    return scores[turn], ids[turn]


def _unpacked(stored: object, path: str | Path) -> tuple[Scores, Ids]:
    if not isinstance(stored, torch.Tensor) or stored.ndim != 4 or len(stored) != 2 or stored.numel() == 0:
        found = list(stored.shape) if isinstance(stored, torch.Tensor) else type(stored).__name__
        raise BadSampleError(f"the label map {path} holds {found}, not a tensor [2, k, height, width]")
    logits, numbers = stored.float().numpy()  # (k, height, width) each
    with np.errstate(invalid="ignore", over="ignore"):  # what is no number becomes an unequal integer
        ids = numbers.astype(np.int32)
        scores = logits.astype(np.float16)
    if not np.isfinite(scores).all() or (ids < 0).any() or (ids != numbers).any():
        raise BadSampleError(f"the label map {path} has values that are no logits or no class numbers")
    return scores, ids
