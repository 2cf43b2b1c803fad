"""Write a label store shard by shard, in any order and from any number of processes.

A shard is finished when its record, maps-NNNNN.json, is written. A later attempt with the same metadata
reuses it if its checksum is still right. Invariant: only `finish` writes store.json, which makes the folder
a store.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from horovod_volo.core.atomic_file import atomic_write, file_sha256, make_folder, remove_partials
from horovod_volo.core.batch import NO_CLASS
from horovod_volo.core.errors import UserError
from horovod_volo.token_labels import store
from horovod_volo.token_labels.keys import encode_keys

SHARD_ROWS = 8192

Scores = NDArray[np.float16]  # (rows, k, height, width)
Ids = NDArray[np.integer[Any]]  # likewise


@dataclass(frozen=True)
class ShardRecord:
    """A finished shard, with the reason for each map that is missing in it."""

    shard: store.Shard
    problems: tuple[str, ...]


@dataclass(frozen=True)
class LabelStoreWriter:
    """Writer of an unfinished store; every process that writes shards has an equal one."""

    folder: Path
    metadata: store.StoreMetadata

    @property
    def shards(self) -> int:
        """Return the number of shards of the finished store."""
        return -(-self.metadata.maps // self.metadata.shard_rows)

    def rows(self, number: int) -> range:
        """Return the rows of a shard."""
        first = number * self.metadata.shard_rows
        return range(first, min(first + self.metadata.shard_rows, self.metadata.maps))

    def empty_shard(self, number: int) -> tuple[Scores, Ids]:
        """Return a shard's logits and class numbers, with NO_CLASS in every row."""
        shape = (len(self.rows(number)), *self.metadata.map_shape)  # (rows, k, height, width)
        return np.zeros(shape, np.float16), np.full(shape, NO_CLASS, np.dtype(self.metadata.ids))

    def write(self, number: int, scores: Scores, ids: Ids, problems: Sequence[str]) -> ShardRecord:
        """Write a shard atomically, then its record."""
        content = save({"scores": scores, "ids": ids})
        name = f"maps-{number:05}.safetensors"
        missing = int((ids[:, 0, 0, 0] == NO_CLASS).sum())
        shard = store.Shard(
            name, self.rows(number).start, len(ids), missing, hashlib.sha256(content).hexdigest()
        )
        record = ShardRecord(shard, tuple(problems))
        written = json.dumps(asdict(record), indent=1).encode()
        try:
            for path, part in ((self.folder / name, content), (self._record_path(number), written)):
                with atomic_write(path) as file:
                    file.write(part)
        except OSError as error:
            raise UserError(
                f"{self.folder / name} cannot be written: {error}. Free disk space, then run the same "
                "command again: finished shards are reused."
            ) from None
        return record

    def finished(self, number: int) -> ShardRecord | None:
        """Return the record of a shard that is finished and undamaged, else None."""
        try:
            stored = json.loads(self._record_path(number).read_bytes())
            record = ShardRecord(store.Shard(**stored["shard"]), tuple(stored["problems"]))
            undamaged = file_sha256(self.folder / record.shard.file) == record.shard.sha256
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record if undamaged else None

    def finish(self) -> store.StoreMetadata:
        """Write store.json and remove the records; every shard must be finished."""
        stored = [json.loads(self._record_path(number).read_bytes()) for number in range(self.shards)]
        metadata = replace(self.metadata, shards=tuple(store.Shard(**record["shard"]) for record in stored))
        with atomic_write(self.folder / store.METADATA_FILE) as file:
            file.write(metadata.to_json())
        for number in range(self.shards):
            self._record_path(number).unlink()
        (self.folder / store.UNFINISHED_FILE).unlink()
        remove_partials(self.folder)
        return metadata

    def _record_path(self, number: int) -> Path:
        return self.folder / f"maps-{number:05}.json"


def open_writer(
    folder: Path,
    keys: Sequence[str],
    *,
    classes: int,
    map_shape: tuple[int, int, int],
    shard_rows: int = SHARD_ROWS,
    **provenance: Any,
) -> LabelStoreWriter:
    """Start a store with these keys, or resume an unfinished one that is equal; one process calls this.

    `provenance` are the fields of StoreMetadata that tell where the maps are from.
    """
    content = encode_keys(keys)
    if content.count(b"\n") != len(keys):
        raise UserError("the name of a class or an image contains a line break. Rename it.")
    metadata = store.StoreMetadata(
        version=store.VERSION,
        maps=len(keys),
        classes=classes,
        top=map_shape[0],
        height=map_shape[1],
        width=map_shape[2],
        ids=store.ids_type(classes),
        keys=hashlib.sha256(content).hexdigest(),
        shard_rows=shard_rows,
        shards=(),
        **provenance,
    )
    if store.is_unfinished(folder):
        before, now = asdict(store.read_metadata(folder / store.UNFINISHED_FILE)), asdict(metadata)
        changed = [f"{name} was {before[name]}, is {now[name]}" for name in now if before[name] != now[name]]
        if changed:
            raise UserError(
                f"{folder} holds an unfinished store with other metadata ({'; '.join(changed)}). Run the "
                "command that started it to resume it, or remove the folder to start again."
            )
        return LabelStoreWriter(folder, metadata)
    make_folder(folder)
    for name, written in ((store.KEYS_FILE, content), (store.UNFINISHED_FILE, metadata.to_json())):
        with atomic_write(folder / name) as file:
            file.write(written)
    return LabelStoreWriter(folder, metadata)


def check_new_store(folder: Path) -> None:
    """Raise UserError if no store can be written or resumed in this folder."""
    if store.is_store(folder):
        raise UserError(
            f"{folder} is already a complete label store. Remove it first, or name another folder."
        )
    if store.is_unfinished(folder) or not folder.exists():
        return
    # Temporary files of killed processes have names that start with a dot.
    if not folder.is_dir() or any(
        entry.name != store.KEYS_FILE and not entry.name.startswith(".") for entry in folder.iterdir()
    ):
        raise UserError(
            f"{folder} is a file, or holds other files. Name a folder that is empty or does not exist yet."
        )
