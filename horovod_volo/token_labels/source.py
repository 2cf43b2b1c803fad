"""Open label maps, whether they are a packed store or a folder of published files."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.core.names import Registry
from horovod_volo.token_labels.geometry import MapGeometry, assumption_warning
from horovod_volo.token_labels.keys import NamedImages
from horovod_volo.token_labels.store import LabelStore, is_store, is_unfinished


class LabelSource(Protocol):
    """Label maps of a catalog's images, all of the same shape."""

    map_shape: tuple[int, int, int]  # k, height, width
    geometry: MapGeometry  # the part of its image that a map is taken to cover
    geometry_assumed: bool  # neither recorded nor stated
    recorded_geometry: MapGeometry | None  # None: nothing is recorded
    teacher: str
    generated: bool  # found by full names, with centred logits; else by published keys, with any logits

    def read(self, index: int) -> tuple[NDArray[np.float16], NDArray[np.integer[Any]]]:
        """Return logits and class numbers of image `index`. Thread-safe; raises BadSampleError."""

    def close(self) -> None:
        """Close all files; maps that were read stay valid."""


UNKNOWN_TEACHER = "unknown"  # of published maps
_MAPS_TRIED = 64  # for their classes
# Opens label maps: (their folder, images, folder for caches).
FORMATS: Registry[Callable[[Path, NamedImages, Path | None], LabelSource]] = Registry(
    "format of label maps", "--token-label-data"
)
FORMATS.register("store", LabelStore)


def open_labels(
    folder: str, catalog: NamedImages, cache: Path | None, geometry: MapGeometry | None = None
) -> LabelSource:
    """Open a packed store or a folder of published maps.

    `cache` is a folder for the rows of a store's images; `geometry` overrides the recorded one.
    """
    source = _open(Path(folder), catalog, cache)
    if geometry is not None:
        source.geometry, source.geometry_assumed = geometry, False
    return source


def map_warnings(folder: str, source: LabelSource) -> list[str]:
    """Warn of a geometry that is assumed or not the recorded one, and of logits that may not be centred."""
    found = [assumption_warning(folder, source.geometry)] if source.geometry_assumed else []
    recorded = source.recorded_geometry
    if recorded is not None and recorded != source.geometry:
        found.append(
            f"the label maps in {folder} are recorded to cover {recorded.description}, but --map-geometry "
            f"says {source.geometry.description}"
        )
    if source.teacher != UNKNOWN_TEACHER and not source.generated:
        found.append(
            f"an earlier version generated the maps in {folder}, so their logits may not be centred: "
            f"generate them again with their teacher, {source.teacher}"
        )
    return found


def classes_warnings(folder: str, source: LabelSource, catalog: NamedImages) -> list[str]:
    """Warn if maps rarely name their images' classes: they may have been made for another order of these."""
    agreed = list[bool]()
    for index in np.unique(np.linspace(0, len(catalog) - 1, _MAPS_TRIED).astype(np.int64)).tolist():
        with suppress(BadSampleError):
            scores, ids = source.read(index)
            best = np.take_along_axis(ids, scores.argmax(axis=0)[None], axis=0)  # (1, height, width)
            agreed.append(bool(np.bincount(best.ravel()).argmax() == catalog.targets[index]))
    if 2 * sum(agreed) >= len(agreed):
        return []
    return [
        f"only {sum(agreed)} of the {len(agreed)} label maps of {folder} that were tried name their image's "
        "class in most cells: the teacher may have had the classes in another order, or is not good"
    ]


def _open(path: Path, catalog: NamedImages, cache: Path | None) -> LabelSource:
    if is_unfinished(path):
        raise UserError(
            f"the label store {path} is unfinished. Run the `horovod-volo labels` command of it again."
        )
    if not path.is_dir():
        raise UserError(
            f"there is no folder {path}. --token-label-data takes a packed store, or a folder with "
            "CLASS/IMAGE.pt for every training image."
        )
    return FORMATS.find("store" if is_store(path) else "published")(path, catalog, cache)
