"""A label store in the making: shards appear one by one, in any order, from any process.

A shard is finished when its record lies beside it; a later attempt keeps it if its checksum still holds and
the facts of both attempts are the same. Only `finish` makes the folder a store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from horovod_volo.core.atomic_file import atomic_write, remove_partials
from horovod_volo.core.errors import UserError
from horovod_volo.data.labels.keys import digest_of, text_of
from horovod_volo.data.labels.store import (
    DESCRIPTION,
    KEYS,
    NO_CLASS,
    VERSION,
    Shard,
    StoreFacts,
    ids_type,
    is_store,
    read_facts,
)

PLAN = "making.json"
SHARD_ROWS = 8192
READ_BYTES = 2**20


@dataclass(frozen=True)
class ShardProgress:
    """A finished shard, and what was wrong with the samples whose maps it lacks."""

    shard: Shard
    problems: tuple[str, ...]


@dataclass(frozen=True)
class LabelStoreWriter:
    """A store in the making, the same for every process that works at it."""

    folder: Path
    facts: StoreFacts

    @property
    def shards(self) -> int:
        """Return how many shards the store will have."""
        return -(-self.facts.maps // self.facts.shard_rows)

    def rows(self, number: int) -> range:
        """Return the rows of the store that a shard holds."""
        first = number * self.facts.shard_rows
        return range(first, min(first + self.facts.shard_rows, self.facts.maps))

    def empty(self, number: int) -> tuple[NDArray[np.float16], NDArray[np.integer[Any]]]:
        """Return a shard's scores and class numbers with no map in them yet."""
        shape = (len(self.rows(number)), *self.facts.size)  # (rows, k, height, width)
        return np.zeros(shape, np.float16), np.full(shape, NO_CLASS, np.dtype(self.facts.ids))

    def write(
        self,
        number: int,
        scores: NDArray[np.float16],
        ids: NDArray[np.integer[Any]],
        problems: Sequence[str],
    ) -> ShardProgress:
        """Publish a shard, then its record."""
        content = save({"scores": scores, "ids": ids})
        name = f"maps-{number:05}.safetensors"
        missing = int((ids[:, 0, 0, 0] == NO_CLASS).sum())
        shard = Shard(name, self.rows(number).start, len(ids), missing, digest_of(content))
        record = ShardProgress(shard, tuple(problems))
        try:
            with atomic_write(self.folder / name) as file:
                file.write(content)
            with atomic_write(self._record_path(number)) as file:
                file.write(json.dumps(asdict(record), indent=1).encode())
        except OSError as error:
            raise UserError(
                f"{self.folder / name} cannot be written: {error}. Make room, then give the same command "
                "again: finished shards are kept."
            ) from None
        return record

    def finished(self, number: int) -> ShardProgress | None:
        """Return the record of a shard that an earlier attempt finished, None if it must be made."""
        try:
            stored = json.loads(self._record_path(number).read_bytes())
            record = ShardProgress(Shard(**stored["shard"]), tuple(stored["problems"]))
            whole = checksum(self.folder / record.shard.file) == record.shard.sha256
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record if whole else None

    def finish(self) -> StoreFacts:
        """Make the folder a store, once every shard is finished."""
        stored = [json.loads(self._record_path(number).read_bytes()) for number in range(self.shards)]
        facts = replace(self.facts, shards=tuple(Shard(**record["shard"]) for record in stored))
        with atomic_write(self.folder / DESCRIPTION) as file:
            file.write(facts.content())
        for number in range(self.shards):
            self._record_path(number).unlink()
        (self.folder / PLAN).unlink()
        remove_partials(self.folder)
        return facts

    def _record_path(self, number: int) -> Path:
        return self.folder / f"maps-{number:05}.json"


def begin(
    folder: Path,
    keys: Sequence[str],
    *,
    classes: int,
    size: tuple[int, int, int],
    geometry: str,
    teacher: str,
    catalog: str,
    shard_rows: int = SHARD_ROWS,
    geometry_assumed: bool = False,
) -> LabelStoreWriter:
    """Begin a store for these keys, or go on with one that was begun alike; one process does this."""
    content = text_of(keys)
    if content.count(b"\n") != len(keys):
        raise UserError("a class or an image has a line break in its name. Rename it.")
    facts = StoreFacts(
        version=VERSION,
        maps=len(keys),
        classes=classes,
        top=size[0],
        height=size[1],
        width=size[2],
        ids=ids_type(classes),
        geometry=geometry,
        teacher=teacher,
        keys=digest_of(content),
        catalog=catalog,
        shard_rows=shard_rows,
        shards=(),
        geometry_assumed=geometry_assumed,
    )
    check_free(folder)
    if is_unfinished(folder):
        _check_alike(folder, facts)
        return LabelStoreWriter(folder, facts)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / KEYS) as file:
        file.write(content)
    with atomic_write(folder / PLAN) as file:
        file.write(facts.content())
    return LabelStoreWriter(folder, facts)


def check_free(folder: Path) -> None:
    """Refuse a folder in which no store can be made, before any work is done for it."""
    if is_store(folder):
        raise UserError(f"{folder} is a whole label store already. Remove it first, or name another folder.")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file. Name a folder for the store.")
    if not folder.is_dir() or is_unfinished(folder):
        return
    # What a killed process was writing has a name that begins with a dot.
    if any(entry.name != KEYS and not entry.name.startswith(".") for entry in folder.iterdir()):
        raise UserError(f"{folder} holds other files. Name a folder that is empty or does not exist yet.")


def is_unfinished(folder: Path) -> bool:
    """Say whether a store was begun in a folder and is not whole yet."""
    return (folder / PLAN).is_file() and not is_store(folder)


def checksum(path: Path) -> str:
    """Return a file's SHA-256, reading a little at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _check_alike(folder: Path, facts: StoreFacts) -> None:
    begun = read_facts(folder / PLAN)
    before, now = asdict(begun), asdict(facts)
    other = [name for name in now if before[name] != now[name]]
    if other:
        told = "; ".join(f"{name} was {before[name]}, is {now[name]}" for name in other)
        raise UserError(
            f"{folder} holds an unfinished store made from something else ({told}). Give the same command "
            "again to go on with it, or remove the folder to begin anew."
        )
