"""Pack published label maps, one file per image, into a store.

Every map is read and validated once. Shards that an earlier attempt finished are reused, except those with
missing maps, which may have been repaired since.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from horovod_volo.core.atomic_file import remove_partials
from horovod_volo.core.errors import BadSampleError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.process_pool import run_in_processes
from horovod_volo.labelling import store_writer
from horovod_volo.token_labels import published_maps
from horovod_volo.token_labels.geometry import MapGeometry, assumption_warning
from horovod_volo.token_labels.keys import catalog_keys
from horovod_volo.token_labels.source import UNKNOWN_TEACHER

Progress = Callable[[int, int], None]  # maps done, maps in all


def import_labels(
    source: Path,
    folder: Path,
    catalog: Catalog,
    *,
    workers: int,
    fail_on_bad_samples: bool,
    progress: Progress,
    warn: Callable[[str], None],
    shard_rows: int = store_writer.SHARD_ROWS,
    geometry: MapGeometry | None = None,
) -> tuple[int, list[str]]:
    """Pack the maps in `source` into the store `folder`; return their number and the problems found.

    Those of a catalog's images are packed, in its order. With `fail_on_bad_samples`, problems leave the store
    unfinished, to be resumed. `geometry` None means as recorded in `source`; without a record it is assumed,
    and `warn` is called.
    """
    store_writer.check_new_store(folder)
    keys, classes = catalog_keys(catalog), len(catalog.classes)
    probed = (source / f"{key}.pt" for key in keys[:: max(1, len(keys) // published_maps.MAPS_PROBED)])
    map_shape = published_maps.probe_map_shape(probed, classes)
    geometry, assumed = (geometry, False) if geometry else published_maps.read_geometry(source, map_shape)
    if assumed:
        warn(assumption_warning(folder, geometry))
    writer = store_writer.open_writer(
        folder,
        keys,
        classes=classes,
        map_shape=map_shape,
        shard_rows=shard_rows,
        geometry=str(geometry),
        geometry_assumed=assumed,
        teacher=UNKNOWN_TEACHER,
        catalog=catalog.digest,
    )
    finished = {number: writer.finished(number) for number in range(writer.shards)}
    records = {number: record for number, record in finished.items() if record and not record.problems}
    _import_shards(writer, source, keys, workers, records, progress)
    problems = [problem for number in range(writer.shards) for problem in records[number].problems]
    if not (problems and fail_on_bad_samples):
        writer.finish()
    return len(keys), problems


def _import_shards(
    writer: store_writer.LabelStoreWriter,
    source: Path,
    keys: Sequence[str],
    workers: int,
    records: dict[int, store_writer.ShardRecord],
    progress: Progress,
) -> None:
    """Write the shards that have no record, and add theirs."""

    def add(found: Mapping[int, store_writer.ShardRecord]) -> None:
        records.update(found)
        progress(sum(record.shard.rows for record in records.values()), len(keys))

    add({})
    missing = [number for number in range(writer.shards) if number not in records]
    rows = {number: writer.rows(number) for number in missing}
    tasks = {number: (writer, number, source, keys[each.start : each.stop]) for number, each in rows.items()}
    if workers == 1 or len(tasks) < 2:
        for number, task in tasks.items():
            add({number: import_shard(*task)})
        return
    try:
        run_in_processes(import_shard, tasks, workers, lambda number, record: add({number: record}))
    finally:
        remove_partials(writer.folder)  # of workers that were killed


def import_shard(
    writer: store_writer.LabelStoreWriter, number: int, source: Path, keys: Sequence[str]
) -> store_writer.ShardRecord:
    """Read the maps of one shard and write it."""
    scores, ids = writer.empty_shard(number)
    expected, problems = (writer.metadata.classes, writer.metadata.map_shape), list[str]()
    for row, key in enumerate(keys):
        try:
            scores[row], ids[row] = published_maps.read_published_map(source / f"{key}.pt", *expected)
        except BadSampleError as problem:
            problems.append(str(problem))
    return writer.write(number, scores, ids, problems)
