"""Pack the published label maps, one small file for each image, into a store.

Every map is read and checked once. A shard that an earlier attempt finished is kept, unless maps are missing
in it that may have been mended since.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from horovod_volo.core.errors import UserError
from horovod_volo.data.bad_samples import BadSampleError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.geometry import MapGeometry, assumption
from horovod_volo.data.labels.keys import keys_of
from horovod_volo.data.labels.published_maps import (
    MAPS_TRIED,
    first_size,
    geometry_of,
    read_published_map,
)
from horovod_volo.data.labels.store_writer import (
    SHARD_ROWS,
    LabelStoreWriter,
    ShardProgress,
    begin,
    check_free,
)

Progress = Callable[[int, int], None]  # maps done, of how many
Tell = Callable[[str], None]


def published_keys(source: Path) -> tuple[list[str], int]:
    """Return the keys of all maps in a published tree, sorted, and how many class folders it has."""
    if not source.is_dir():
        raise UserError(f"there is no folder {source}. Name the folder that holds CLASS/IMAGE.pt.")
    with os.scandir(source) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    keys = []
    for name in classes:
        with os.scandir(source / name) as entries:
            stems = (entry.name.removesuffix(".pt") for entry in entries if entry.name.endswith(".pt"))
            keys += [f"{name}/{stem}" for stem in sorted(stems)]
    if not keys:
        raise UserError(f"{source} has no label maps. Name the folder that holds CLASS/IMAGE.pt.")
    return keys, len(classes)


def import_labels(
    source: Path,
    folder: Path,
    catalog: Catalog | None,
    *,
    classes: int,
    workers: int,
    bad_samples_end_it: bool,
    progress: Progress,
    tell: Tell,
    shard_rows: int = SHARD_ROWS,
    geometry: MapGeometry | None = None,
) -> tuple[int, list[str]]:
    """Pack `source` into the store `folder`; return the number of maps and what was wrong with some.

    With a catalog, the maps of its images are packed, in its order. `classes` 0 stands for as many as
    there are classes in the catalog or else class folders in the tree. Where problems end it, the folder
    is left for another attempt. `geometry` is which part of its image a map covers; None: as the folder
    says, or else assumed, and then `tell` is told.
    """
    check_free(folder)
    if catalog is None:
        keys, folders = published_keys(source)
    else:
        keys, folders = keys_of(catalog), len(catalog.classes)
    tried = (source / f"{key}.pt" for key in keys[:: max(1, len(keys) // MAPS_TRIED)])
    size = first_size(tried, classes or folders)
    covered, assumed = (geometry, False) if geometry is not None else geometry_of(source, size)
    if assumed:
        tell(assumption(folder, covered))
    making = begin(
        folder,
        keys,
        classes=classes or folders,
        size=size,
        geometry=str(covered),
        geometry_assumed=assumed,
        teacher="unknown",
        catalog="" if catalog is None else catalog.digest,
        shard_rows=shard_rows,
    )
    records = _kept(making, remake_incomplete=bad_samples_end_it)
    done = sum(record.shard.rows for record in records.values())
    progress(done, len(keys))
    for number, record in _made(making, source, keys, workers, records):
        records[number] = record
        done += record.shard.rows
        progress(done, len(keys))
    problems = [problem for number in range(making.shards) for problem in records[number].problems]
    if not (problems and bad_samples_end_it):
        making.finish()
    return len(keys), problems


def _kept(making: LabelStoreWriter, *, remake_incomplete: bool) -> dict[int, ShardProgress]:
    """Return the records of the shards that need not be made."""
    found = {number: making.finished(number) for number in range(making.shards)}
    return {
        number: record
        for number, record in found.items()
        if record is not None and not (record.problems and remake_incomplete)
    }


def _made(
    making: LabelStoreWriter, source: Path, keys: Sequence[str], workers: int, kept: Container[int]
) -> Iterator[tuple[int, ShardProgress]]:
    """Make the shards that are not kept, in any order."""
    work = {
        number: (making, number, source, [keys[row] for row in making.rows(number)])
        for number in range(making.shards)
        if number not in kept
    }
    if workers == 1 or len(work) < 2:
        yield from ((number, make_shard(*order)) for number, order in work.items())
        return
    # Spawned, not forked: torch has started threads here, which a forked process would wait for in vain.
    with ProcessPoolExecutor(min(workers, len(work)), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(make_shard, *order): number for number, order in work.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise UserError(
                "a worker process was killed, perhaps for want of memory. Give the same command again, with "
                "fewer --workers if it happens again: finished shards are kept."
            ) from None


def make_shard(making: LabelStoreWriter, number: int, source: Path, keys: Sequence[str]) -> ShardProgress:
    """Read the maps of one shard and write it."""
    scores, ids = making.empty(number)
    problems = []
    for place, key in enumerate(keys):
        path = source / f"{key}.pt"
        try:
            read_scores, read_ids = read_published_map(path, making.facts.classes)
            if read_scores.shape != making.facts.size:
                raise BadSampleError(
                    f"the label map {path} has the shape {read_scores.shape}, others have {making.facts.size}"
                )
        except BadSampleError as problem:
            problems.append(str(problem))
            continue
        scores[place], ids[place] = read_scores, read_ids
    return making.write(number, scores, ids, problems)
