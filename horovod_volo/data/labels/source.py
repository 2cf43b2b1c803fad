"""Where label maps come from, whatever form they lie in."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.geometry import MapGeometry, assumption
from horovod_volo.data.labels.published_maps import PublishedMaps
from horovod_volo.data.labels.store import LabelStore, is_store
from horovod_volo.data.labels.store_writer import is_unfinished


class LabelSource(Protocol):
    """The label maps of a catalog's images; all are of one size."""

    size: tuple[int, int, int]  # k, height, width
    geometry: MapGeometry  # which part of its image a map is taken to cover
    geometry_assumed: bool  # for want of a record
    recorded_geometry: MapGeometry | None  # None: there is none

    def read(self, index: int) -> tuple[NDArray[np.float16], NDArray[np.integer[Any]]]:
        """Return the scores and class numbers of image `index`; any thread. Raises BadSampleError."""

    def close(self) -> None:
        """Let go of files; maps already read stay valid."""


def open_labels(
    folder: str, catalog: Catalog, cache: Path | None, geometry: MapGeometry | None = None
) -> LabelSource:
    """Open a packed store or a folder of published maps; `cache` keeps what need not be found out twice.

    `geometry` is what a map covers, whatever is recorded; None: as recorded, or assumed.
    """
    source = _open(Path(folder), catalog, cache)
    if geometry is not None:
        source.geometry, source.geometry_assumed = geometry, False
    return source


def geometry_remark(folder: str, source: LabelSource) -> list[str]:
    """Return what a user should be told of the geometry that a source's maps are read with, if anything."""
    if source.geometry_assumed:
        return [assumption(folder, source.geometry)]
    recorded = source.recorded_geometry
    if recorded is None or recorded == source.geometry:
        return []
    return [
        f"the label maps in {folder} are recorded to cover {recorded.described}, and are taken to cover "
        f"{source.geometry.described} here"
    ]


def _open(path: Path, catalog: Catalog, cache: Path | None) -> LabelSource:
    if is_store(path):
        return LabelStore(path, catalog, cache)
    if is_unfinished(path):
        raise UserError(
            f"the label store {path} is not whole yet. Finish it by giving again the tools/labels command "
            "that began it."
        )
    if not path.is_dir():
        raise UserError(
            f"there is no folder {path}. --token-label-data names a packed store, or a folder that holds "
            "CLASS/IMAGE.pt for every training image."
        )
    return PublishedMaps(path, catalog)
