"""Pack published label maps, one file per image, into a store.

Every map is read and validated once. Shards that an earlier attempt finished are reused, except those with
missing maps, which may have been repaired since.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from horovod_volo.core.atomic_file import remove_partials
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.process_pool import run_in_processes
from horovod_volo.labelling.store_writer import (
    SHARD_ROWS,
    LabelStoreWriter,
    ShardRecord,
    check_new_store,
    open_writer,
)
from horovod_volo.token_labels.geometry import MapGeometry, assumption_warning
from horovod_volo.token_labels.keys import catalog_keys
from horovod_volo.token_labels.published_maps import (
    MAPS_PROBED,
    probe_map_shape,
    read_geometry,
    read_published_map,
)

Progress = Callable[[int, int], None]  # maps done, maps in all


def published_keys(source: Path) -> tuple[list[str], int]:
    """Return the sorted keys of all maps in a folder CLASS/IMAGE.pt, and the number of class folders."""
    if not source.is_dir():
        raise UserError(f"there is no folder {source}. Name the folder with CLASS/IMAGE.pt.")
    with os.scandir(source) as entries:
        classes = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    keys = []
    for name in classes:
        stems = sorted(path.stem for path in (source / name).iterdir() if path.suffix == ".pt")
        keys += [f"{name}/{stem}" for stem in stems]
    if not keys:
        raise UserError(f"{source} has no label maps. Name the folder with CLASS/IMAGE.pt.")
    return keys, len(classes)


def import_labels(
    source: Path,
    folder: Path,
    catalog: Catalog | None,
    *,
    classes: int,
    workers: int,
    fail_on_bad_samples: bool,
    progress: Progress,
    warn: Callable[[str], None],
    shard_rows: int = SHARD_ROWS,
    geometry: MapGeometry | None = None,
) -> tuple[int, list[str]]:
    """Pack the maps in `source` into the store `folder`; return their number and the problems found.

    With a catalog only the maps of its images are packed, in its order. `classes` 0 means as many as the
    catalog or, without one, `source` has. With `fail_on_bad_samples`, problems leave the store unfinished, to
    be resumed. `geometry` None means as recorded in `source`; without a record it is assumed, and `warn` is
    called.
    """
    check_new_store(folder)
    if catalog is None:
        keys, class_folders = published_keys(source)
    else:
        keys, class_folders = catalog_keys(catalog), len(catalog.classes)
    probed = (source / f"{key}.pt" for key in keys[:: max(1, len(keys) // MAPS_PROBED)])
    map_shape = probe_map_shape(probed, classes or class_folders)
    geometry, assumed = (geometry, False) if geometry is not None else read_geometry(source, map_shape)
    if assumed:
        warn(assumption_warning(folder, geometry))
    writer = open_writer(
        folder,
        keys,
        classes=classes or class_folders,
        map_shape=map_shape,
        geometry=str(geometry),
        geometry_assumed=assumed,
        teacher="unknown",
        catalog="" if catalog is None else catalog.digest,
        shard_rows=shard_rows,
    )
    records = {  # of finished shards; those with missing maps may have been repaired
        number: record
        for number in range(writer.shards)
        if (record := writer.finished(number)) and not (record.problems and fail_on_bad_samples)
    }
    _import_shards(writer, source, keys, workers, records, progress)
    problems = [problem for number in range(writer.shards) for problem in records[number].problems]
    if not (problems and fail_on_bad_samples):
        writer.finish()
    return len(keys), problems


def _import_shards(
    writer: LabelStoreWriter,
    source: Path,
    keys: Sequence[str],
    workers: int,
    records: dict[int, ShardRecord],
    progress: Progress,
) -> None:
    """Write the shards that have no record, and add theirs."""

    def report() -> None:
        progress(sum(record.shard.rows for record in records.values()), len(keys))

    def add(number: int, record: ShardRecord) -> None:
        records[number] = record
        report()

    report()
    tasks = {
        number: (writer, number, source, [keys[row] for row in writer.rows(number)])
        for number in range(writer.shards)
        if number not in records
    }
    if workers == 1 or len(tasks) < 2:
        for number, task in tasks.items():
            add(number, import_shard(*task))
        return
    try:
        run_in_processes(import_shard, tasks, workers, add)
    finally:
        remove_partials(writer.folder)  # of workers that were killed


def import_shard(writer: LabelStoreWriter, number: int, source: Path, keys: Sequence[str]) -> ShardRecord:
    """Read the maps of one shard and write it."""
    scores, ids = writer.empty_shard(number)
    problems = []
    for row, key in enumerate(keys):
        path = source / f"{key}.pt"
        try:
            maps = read_published_map(path, writer.metadata.classes)
            if maps[0].shape != writer.metadata.map_shape:
                raise BadSampleError(
                    f"the label map {path} has the shape {maps[0].shape}, the others have "
                    f"{writer.metadata.map_shape}"
                )
        except BadSampleError as problem:
            problems.append(str(problem))
        else:
            scores[row], ids[row] = maps
    return writer.write(number, scores, ids, problems)
