"""Verify a label store: its files for damage, and its maps against the classes of their images."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.atomic_file import file_sha256
from horovod_volo.core.batch import NO_CLASS
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.token_labels.geometry import MapGeometry
from horovod_volo.token_labels.keys import NO_ROW, find_rows, read_keys
from horovod_volo.token_labels.store import KEYS_FILE, METADATA_FILE, StoreMetadata, read_metadata, read_shard

_MAPS_PER_BLOCK = 256  # bounds the memory of the per-class sums, also with 21,841 classes
_NO_IMAGE = -1  # target of a row whose image is not in the catalog


@dataclass
class StoreReport:
    metadata: StoreMetadata
    missing: int = 0  # rows without a map
    damage: list[str] = field(default_factory=list)
    with_image: int = 0  # undamaged maps whose image is in the catalog
    agreeing: int = 0  # of these, maps whose most probable class is the image's class
    images_without_map: int = 0
    maps_without_image: int = 0

    def rows(self, *, compared: bool) -> list[tuple[str, str]]:
        """Return the report as (name, value); `compared`: with what concerns a catalog's images."""
        metadata, geometry = self.metadata, MapGeometry.parse(self.metadata.geometry)
        centred = "centred: those of a cell's other classes are 0 on average"
        percent = 100 * self.agreeing / max(1, self.with_image)
        of_images = [
            ("images without a map", f"{self.images_without_map}"),
            ("maps without an image", f"{self.maps_without_image}"),
            ("agreement", f"{percent:.2f} % of {self.with_image} maps: the most probable class over all"),
            ("", "cells is the image's class"),
        ]
        return [
            ("maps", f"{metadata.maps - self.missing}; {self.missing} rows have no map"),
            ("map size", f"{metadata.height} x {metadata.width} cells, {metadata.top} classes each"),
            ("classes", f"{metadata.classes}, stored as {metadata.ids}"),
            ("teacher", metadata.teacher),
            ("logits", centred if metadata.generated else "the teacher's"),
            ("a map covers", geometry.description + " (assumed)" * metadata.geometry_assumed),
            ("shards", f"{len(metadata.shards)}"),
            *(of_images if compared else ()),
            ("damage", f"{len(self.damage)} problems" if self.damage else "none"),
        ]


def check_store(folder: Path, catalog: Catalog | None, progress: Callable[[int, int], None]) -> StoreReport:
    """Read the whole store, one shard at a time; compare it with the images of `catalog`, if given.

    `progress` is called with the rows that are done, and all.
    """
    report = StoreReport(read_metadata(folder / METADATA_FILE))
    metadata, keys = report.metadata, folder / KEYS_FILE
    if not keys.is_file() or file_sha256(keys) != metadata.keys:
        report.damage.append(f"{keys} is missing, or its checksum is not the one in {METADATA_FILE}")
    elif not len(read_keys(keys)) == metadata.maps == sum(shard.rows for shard in metadata.shards):
        report.damage.append(f"{keys}, {METADATA_FILE} and the shards have different numbers of maps")
    targets = np.full(metadata.maps, _NO_IMAGE, np.int64)  # (rows,) class of each row's image
    images = np.zeros(metadata.maps, np.int64)  # (rows,) number of images that use the row
    if catalog is not None and not report.damage:  # without its keys a store cannot be compared
        try:
            rows = find_rows(catalog, keys, metadata.keys, None, by_name=metadata.generated)
        except UserError as problem:  # images share a key
            rows = np.full(len(catalog), NO_ROW, np.int32)
            report.damage.append(str(problem))
        known = (rows != NO_ROW) & (rows < metadata.maps)
        targets[rows[known]] = catalog.targets[known]
        images = np.bincount(rows[known], minlength=metadata.maps)
        report.images_without_map = len(catalog) - int(known.sum())
    for number, shard in enumerate(metadata.shards):
        end = shard.first + shard.rows
        _check_shard(folder, number, targets[shard.first : end], images[shard.first : end], report)
        progress(end, metadata.maps)
    return report


def _check_shard(
    folder: Path, number: int, targets: NDArray[np.int64], images: NDArray[np.int64], report: StoreReport
) -> None:
    """Add the maps of a shard to the counts of the report, and their damage."""
    shard, classes, cells = report.metadata.shards[number], report.metadata.classes, (1, 2, 3)
    path = folder / shard.file
    try:
        if file_sha256(path) != shard.sha256:
            report.damage.append(f"{path}: its checksum is not the one in {METADATA_FILE}")
        # Each (rows, k, height, width).
        all_scores, all_ids = read_shard(folder, report.metadata, number)
    except (OSError, BadSampleError) as error:
        report.damage.append(str(error))
        return
    invalid = 0
    for first in range(0, shard.rows, _MAPS_PER_BLOCK):
        block = slice(first, first + _MAPS_PER_BLOCK)
        scores, ids, kinds = all_scores[block], all_ids[block], targets[block]
        absent = (ids == NO_CLASS).all(axis=cells)
        good = np.isfinite(scores).all(axis=cells) & ((ids >= 0) & (ids < classes)).all(axis=cells)
        invalid += int((~good & ~absent).sum())
        report.missing += int(absent.sum())
        report.images_without_map += int(images[block][absent].sum())
        report.maps_without_image += int((~absent & (kinds == _NO_IMAGE)).sum())
        compared = good & (kinds != _NO_IMAGE)
        report.with_image += int(compared.sum())
        if compared.any():
            best = best_classes(scores[compared], ids[compared], classes)
            report.agreeing += int((best == kinds[compared]).sum())
    if invalid:
        report.damage.append(f"{path}: {invalid} maps have logits that are not finite, or unknown classes")


def probabilities(scores: NDArray[np.float16], classes: int) -> NDArray[np.float32]:
    """Return the probabilities of the stored classes, by the softmax over all classes of the token loss.

    `scores` are logits (..., k, height, width) of the k best classes; those of all others are taken as 0.
    """
    logits = scores.astype(np.float32)  # (..., k, height, width)
    highest = np.maximum(logits.max(axis=-3, keepdims=True), 0)
    stored = np.exp(logits - highest)
    others = (classes - logits.shape[-3]) * np.exp(-highest)
    result: NDArray[np.float32] = stored / (stored.sum(axis=-3, keepdims=True) + others)
    return result


def best_classes(
    scores: NDArray[np.float16], ids: NDArray[np.integer[Any]], classes: int
) -> NDArray[np.int64]:
    """Return for each map (maps, k, height, width) the class with the highest summed probability (maps,)."""
    rows = np.arange(len(ids)).reshape(-1, 1, 1, 1)
    bins = (rows * classes + ids).ravel()  # one for each pair of map and class
    sums = np.bincount(bins, probabilities(scores, classes).ravel(), minlength=len(ids) * classes)
    best: NDArray[np.int64] = sums.reshape(len(ids), classes).argmax(axis=1)
    return best
