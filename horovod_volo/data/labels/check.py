"""Is a label store whole, and does its teacher agree with the folders its images lie in?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from horovod_volo.data.bad_samples import BadSampleError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.keys import NO_ROW, digest_of, read_keys, rows_of
from horovod_volo.data.labels.probability import best_classes
from horovod_volo.data.labels.store import (
    DESCRIPTION,
    KEYS,
    NO_CLASS,
    Maps,
    StoreFacts,
    read_facts,
    read_shard,
)
from horovod_volo.data.labels.store_writer import checksum

Progress = Callable[[int, int], None]  # rows done, of how many
MAPS_AT_ONCE = 256  # so that the sums of 21,841 classes take tens of megabytes, not gigabytes
UNKNOWN = -1  # class of a map whose image is not in the catalog


@dataclass
class Found:
    """What a check found."""

    facts: StoreFacts
    missing: int = 0
    damage: list[str] = field(default_factory=list)
    with_image: int = 0  # maps whose image is in the catalog
    agreeing: int = 0  # of these, maps whose best class is the image's folder
    images_without_map: int = 0
    maps_without_image: int = 0


def check_store(folder: Path, catalog: Catalog | None, progress: Progress) -> Found:
    """Read the whole store, a shard at a time; compare it with a catalog's images if one is given."""
    found = Found(read_facts(folder / DESCRIPTION))
    _check_keys(folder, found)
    targets = np.full(found.facts.maps, UNKNOWN, np.int64)  # (rows,) class of each row's image
    images = np.full(found.facts.maps, 0, np.int64)  # (rows,) how many images use it
    if catalog is not None:
        rows = rows_of(catalog, folder / KEYS, found.facts.keys, None)
        known = (rows != NO_ROW) & (rows < found.facts.maps)
        targets[rows[known]] = catalog.targets[known]
        images = np.bincount(rows[known], minlength=found.facts.maps)
        found.images_without_map = len(catalog) - int(known.sum())
    done = 0
    for number, shard in enumerate(found.facts.shards):
        span = slice(shard.first, shard.first + shard.rows)
        _check_shard(folder, number, targets[span], images[span], found)
        done += shard.rows
        progress(done, found.facts.maps)
    return found


def _check_keys(folder: Path, found: Found) -> None:
    path = folder / KEYS
    rows = sum(shard.rows for shard in found.facts.shards)
    if not path.is_file() or digest_of(path.read_bytes()) != found.facts.keys:
        found.damage.append(f"{path} is missing or has another checksum than {DESCRIPTION} says")
    elif not len(read_keys(path)) == found.facts.maps == rows:
        found.damage.append(f"{path}, {DESCRIPTION} and the shards disagree about the number of maps")


def _check_shard(
    folder: Path, number: int, targets: NDArray[np.int64], images: NDArray[np.int64], found: Found
) -> None:
    shard = found.facts.shards[number]
    path = folder / shard.file
    try:
        if checksum(path) != shard.sha256:
            found.damage.append(f"{path} has another checksum than {DESCRIPTION} says")
        maps = read_shard(folder, found.facts, number)
    except (OSError, BadSampleError) as error:
        found.damage.append(str(error))
        return
    odd = 0
    for first in range(0, shard.rows, MAPS_AT_ONCE):
        span = slice(first, first + MAPS_AT_ONCE)
        odd += _check_maps((maps[0][span], maps[1][span]), targets[span], images[span], found)
    if odd:
        found.damage.append(f"{path} has {odd} maps with logits that are not finite or with no such classes")


def _check_maps(maps: Maps, targets: NDArray[np.int64], images: NDArray[np.int64], found: Found) -> int:
    """Count what these maps are; return how many are damaged."""
    scores, ids = maps  # (maps, k, height, width) each
    cells = (1, 2, 3)
    absent = (ids == NO_CLASS).all(axis=cells)
    good = np.isfinite(scores).all(axis=cells) & ((ids >= 0) & (ids < found.facts.classes)).all(axis=cells)
    found.missing += int(absent.sum())
    found.images_without_map += int(images[absent].sum())
    found.maps_without_image += int((~absent & (targets == UNKNOWN)).sum())
    compared = good & (targets != UNKNOWN)
    found.with_image += int(compared.sum())
    if compared.any():
        best = best_classes(scores[compared], ids[compared], found.facts.classes)
        found.agreeing += int((best == targets[compared]).sum())
    return int((~good & ~absent).sum())
