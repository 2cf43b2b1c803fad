"""Check a label store for damage, and compare its most probable classes with the images' classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.atomic_file import file_sha256
from horovod_volo.core.batch import NO_CLASS
from horovod_volo.data.bad_samples import BadSampleError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.geometry import MapGeometry, describe_coverage
from horovod_volo.data.labels.keys import NO_ROW, find_rows, read_keys
from horovod_volo.data.labels.probability import best_classes
from horovod_volo.data.labels.store import (
    KEYS_FILE,
    METADATA_FILE,
    Maps,
    StoreMetadata,
    read_metadata,
    read_shard,
)

Progress = Callable[[int, int], None]  # rows checked, rows in all
MAPS_PER_BLOCK = 256  # bounds the memory of the per-class sums, also with 21,841 classes
NO_IMAGE = -1  # target of a row whose image is not in the catalog


@dataclass
class StoreReport:
    """Counts and problems of a store."""

    metadata: StoreMetadata
    missing: int = 0  # rows without a map
    damage: list[str] = field(default_factory=list)
    with_image: int = 0  # undamaged maps whose image is in the catalog
    agreeing: int = 0  # of these, maps whose most probable class is the image's class
    images_without_map: int = 0
    maps_without_image: int = 0


def check_store(folder: Path, catalog: Catalog | None, progress: Progress) -> StoreReport:
    """Read the whole store, one shard at a time; compare it with the images of `catalog`, if given."""
    report = StoreReport(read_metadata(folder / METADATA_FILE))
    _check_keys(folder, report)
    targets = np.full(report.metadata.maps, NO_IMAGE, np.int64)  # (rows,) class of each row's image
    images = np.full(report.metadata.maps, 0, np.int64)  # (rows,) number of images that use the row
    if catalog is not None and not report.damage:  # without its keys a store cannot be compared
        rows = find_rows(catalog, folder / KEYS_FILE, report.metadata.keys, None)
        known = (rows != NO_ROW) & (rows < report.metadata.maps)
        targets[rows[known]] = catalog.targets[known]
        images = np.bincount(rows[known], minlength=report.metadata.maps)
        report.images_without_map = len(catalog) - int(known.sum())
    done = 0
    for number, shard in enumerate(report.metadata.shards):
        span = slice(shard.first, shard.first + shard.rows)
        _check_shard(folder, number, targets[span], images[span], report)
        done += shard.rows
        progress(done, report.metadata.maps)
    return report


def report_rows(report: StoreReport, *, compared: bool) -> list[tuple[str, str]]:
    """Return the lines of a report as (name, value); `compared`: with those about a catalog's images."""
    metadata = report.metadata
    coverage = describe_coverage(MapGeometry.parse(metadata.geometry), assumed=metadata.geometry_assumed)
    lines = [
        ("maps", f"{metadata.maps - report.missing}; {report.missing} rows have no map"),
        ("map size", f"{metadata.height} x {metadata.width} cells, {metadata.top} classes each"),
        ("classes", f"{metadata.classes}, stored as {metadata.ids}"),
        ("teacher", metadata.teacher),
        ("a map covers", coverage),
        ("shards", f"{len(metadata.shards)}"),
    ]
    if compared:
        percent = 100 * report.agreeing / max(1, report.with_image)
        lines += [
            ("images without a map", f"{report.images_without_map}"),
            ("maps without an image", f"{report.maps_without_image}"),
            ("agreement", f"{percent:.2f} % of {report.with_image} maps: the most probable class over all"),
            ("", "cells is the image's class"),
        ]
    lines.append(("damage", f"{len(report.damage)} problems" if report.damage else "none"))
    return lines


def _check_keys(folder: Path, report: StoreReport) -> None:
    path = folder / KEYS_FILE
    rows = sum(shard.rows for shard in report.metadata.shards)
    if not path.is_file() or file_sha256(path) != report.metadata.keys:
        report.damage.append(f"{path} is missing, or its checksum is not the one in {METADATA_FILE}")
    elif not len(read_keys(path)) == report.metadata.maps == rows:
        report.damage.append(f"{path}, {METADATA_FILE} and the shards have different numbers of maps")


def _check_shard(
    folder: Path, number: int, targets: NDArray[np.int64], images: NDArray[np.int64], report: StoreReport
) -> None:
    shard = report.metadata.shards[number]
    path = folder / shard.file
    try:
        if file_sha256(path) != shard.sha256:
            report.damage.append(f"{path}: its checksum is not the one in {METADATA_FILE}")
        scores, ids = read_shard(folder, report.metadata, number)
    except (OSError, BadSampleError) as error:
        report.damage.append(str(error))
        return
    invalid = 0
    for first in range(0, shard.rows, MAPS_PER_BLOCK):
        span = slice(first, first + MAPS_PER_BLOCK)
        invalid += _check_maps((scores[span], ids[span]), targets[span], images[span], report)
    if invalid:
        report.damage.append(f"{path}: {invalid} maps have logits that are not finite, or unknown classes")


def _check_maps(
    maps: Maps, targets: NDArray[np.int64], images: NDArray[np.int64], report: StoreReport
) -> int:
    """Add these maps to the counts of the report; return how many are damaged."""
    scores, ids = maps  # (maps, k, height, width) each
    cells = (1, 2, 3)
    absent = (ids == NO_CLASS).all(axis=cells)
    good = np.isfinite(scores).all(axis=cells) & ((ids >= 0) & (ids < report.metadata.classes)).all(
        axis=cells
    )
    report.missing += int(absent.sum())
    report.images_without_map += int(images[absent].sum())
    report.maps_without_image += int((~absent & (targets == NO_IMAGE)).sum())
    compared = good & (targets != NO_IMAGE)
    report.with_image += int(compared.sum())
    if compared.any():
        best = best_classes(scores[compared], ids[compared], report.metadata.classes)
        report.agreeing += int((best == targets[compared]).sum())
    return int((~good & ~absent).sum())
