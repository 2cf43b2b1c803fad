"""Label maps in the published format of Token Labeling, one file per training image.

`<root>/<class>/<image name up to the first dot>.pt` is a tensor [2, k, height, width] saved by torch: the k
highest raw logits of each cell, then their class numbers. A map belongs to the stored image, so an image and
its map must be flipped together. `<root>/map_geometry.txt` may record which part of the image the maps cover;
without it the geometry is assumed.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.token_labels.geometry import MapGeometry, assumed_geometry
from horovod_volo.token_labels.keys import NamedImages, check_published_keys, label_key
from horovod_volo.token_labels.source import FORMATS, UNKNOWN_TEACHER

Scores = NDArray[np.float16]  # (k, height, width)
Ids = NDArray[np.integer[Any]]  # (k, height, width)

MAPS_PROBED = 64  # for the shape, spread over the images, in case the first ones are damaged
GEOMETRY_FILE = "map_geometry.txt"


class PublishedMaps:
    teacher, generated = UNKNOWN_TEACHER, False

    def __init__(self, root: str | Path, catalog: NamedImages, cache: Path | None = None) -> None:  # noqa: ARG002
        self._root = Path(root)
        self._catalog = catalog
        check_published_keys(catalog)
        self._check_classes()
        indices = np.linspace(0, len(catalog) - 1, MAPS_PROBED).round().astype(np.int64).tolist()
        probed = [self._path(index) for index in dict.fromkeys(indices)]
        self.map_shape = probe_map_shape(probed, len(catalog.classes))
        self.geometry, self.geometry_assumed = read_geometry(self._root, self.map_shape)
        self.recorded_geometry = None if self.geometry_assumed else self.geometry

    def read(self, index: int) -> tuple[Scores, Ids]:
        return read_published_map(self._path(index), len(self._catalog.classes), self.map_shape)

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""

    def _path(self, index: int) -> str:
        # A string, not a Path: pathlib interns every path component, which would grow with every image.
        return f"{self._root}/{label_key(self._catalog.name(index))}.pt"

    def _check_classes(self) -> None:
        """Raise UserError if some class has images but no map for any of them."""
        targets = self._catalog.targets
        present, firsts = np.unique(targets, return_index=True)
        for target, first in zip(present.tolist(), firsts.tolist(), strict=True):
            if Path(self._path(first)).is_file():
                continue
            if not any(Path(self._path(int(index))).is_file() for index in np.flatnonzero(targets == target)):
                raise UserError(
                    f"there is no label map {self._path(first)}, nor one for any other image of class "
                    f"{self._catalog.classes[target]}. --token-label-data takes a packed store, or a folder "
                    "with CLASS/IMAGE.pt for every training image. Generate the missing maps, or drop "
                    "--token-label-data to train every token on the image's class."
                )


def read_geometry(root: Path, map_shape: tuple[int, int, int]) -> tuple[MapGeometry, bool]:
    """Return the geometry of the maps in a folder, and whether it is assumed instead of recorded."""
    path = root / GEOMETRY_FILE
    try:
        return MapGeometry.parse(path.read_text(encoding="utf-8").strip()), False
    except FileNotFoundError:
        return assumed_geometry(*map_shape[1:]), True
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}. Correct or remove it.") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def probe_map_shape(paths: Iterable[str | Path], classes: int) -> tuple[int, int, int]:
    """Return k, height and width of the first valid map among `paths`; all maps must have this shape."""
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
        f"none of the label maps tried can be used; the first problem: {first_problem}. Name the folder of "
        "the maps that were made for these images and classes."
    )


def read_published_map(
    path: str | Path, classes: int, map_shape: tuple[int, int, int] | None = None
) -> tuple[Scores, Ids]:
    """Read one file; raise BadSampleError unless it holds logits and class numbers below `classes`.

    They must have this shape, if one is given.
    """
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise BadSampleError(f"there is no label map {path}") from None
    except Exception as error:  # damaged bytes raise anything
        reason = str(error).partition("\n")[0]
        raise BadSampleError(f"the label map {path} cannot be read: {reason}") from None
    scores, ids = _split(stored, path)
    if ids.max() >= classes:
        raise BadSampleError(
            f"the label map {path} names class {ids.max()}, but there are {classes} classes: "
            "it was made for other classes"
        )
    exact = 2 / torch.finfo(stored.dtype).eps if stored.is_floating_point() else math.inf
    if ids.max() >= exact:  # up to this number the type represents every integer
        raise BadSampleError(
            f"the label map {path} stores class numbers from {exact:.0f} on in {stored.dtype}, which rounds "
            "them: generate it again"
        )
    if map_shape is not None and scores.shape != map_shape:
        raise BadSampleError(
            f"the label map {path} has the shape {scores.shape}, the others have {map_shape}"
        )
    return scores, ids


def _split(stored: object, path: str | Path) -> tuple[Scores, Ids]:
    if not isinstance(stored, torch.Tensor) or stored.ndim != 4 or len(stored) != 2 or stored.numel() == 0:
        content = list(stored.shape) if isinstance(stored, torch.Tensor) else type(stored).__name__
        raise BadSampleError(f"the label map {path} holds {content}, not a tensor [2, k, height, width]")
    logits, numbers = stored.detach().float().numpy()  # (k, height, width) each
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and inf are refused below
        ids = numbers.astype(np.int32)
        scores = logits.astype(np.float16)
    if not np.isfinite(scores).all() or (ids < 0).any() or (ids != numbers).any():
        raise BadSampleError(f"the label map {path} has values that are not logits or not class numbers")
    return scores, ids


FORMATS.register("published", PublishedMaps)
