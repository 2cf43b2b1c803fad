"""Label maps packed into few large files, read in place: a map costs microseconds, the store no memory.

A store is a folder:

    store.json                what is in it, and the SHA-256 of every shard; written last: a store is whole
                              when it is there
    keys.txt                  the key of every row, one a line
    maps-00000.safetensors    scores (rows, k, height, width) half precision, the raw logits, and
                              ids (rows, k, height, width) int16 or int32, the class numbers

All shards but the last have `shard_rows` rows. The row of an image without a map has NO_CLASS everywhere.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from horovod_volo.core.errors import UserError
from horovod_volo.data.bad_samples import BadSampleError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.labels.geometry import CENTRE_CROP, PUBLISHED, MapGeometry, assumed_geometry
from horovod_volo.data.labels.keys import NO_ROW, rows_of

DESCRIPTION = "store.json"
KEYS = "keys.txt"
VERSION = 1
NO_CLASS = -1
UNKNOWN_GEOMETRY = "unknown"  # of a store of imported maps, written before geometries were recorded
LARGEST_SMALL = np.iinfo(np.int16).max

Maps = tuple[NDArray[np.float16], NDArray[np.integer[Any]]]  # of a shard: (rows, k, height, width) each


@dataclass(frozen=True)
class Shard:
    """One file of a store."""

    file: str
    first: int  # row of the store that its first row is
    rows: int
    missing: int  # rows without a map
    sha256: str


@dataclass(frozen=True)
class StoreFacts:
    """What a store holds."""

    version: int
    maps: int  # rows, those without a map among them
    classes: int
    top: int
    height: int
    width: int
    ids: str
    geometry: str  # which part of its image a map covers, as MapGeometry writes it
    teacher: str
    keys: str  # SHA-256 of keys.txt
    catalog: str  # digest of the catalog whose images the rows are, in its order; empty: made without one
    shard_rows: int
    shards: tuple[Shard, ...]
    geometry_assumed: bool = False  # nobody said it

    @property
    def size(self) -> tuple[int, int, int]:
        """Return k, height and width of every map."""
        return self.top, self.height, self.width

    def content(self) -> bytes:
        """Return the text that stands for these facts in a file."""
        return (json.dumps(asdict(self), indent=2) + "\n").encode()


def ids_type(classes: int) -> str:
    """Name the smallest type that holds every class number and NO_CLASS."""
    return "int16" if classes <= LARGEST_SMALL else "int32"


def is_store(folder: Path) -> bool:
    """Say whether a folder is a whole store."""
    return (folder / DESCRIPTION).is_file()


def read_facts(path: Path) -> StoreFacts:
    """Read the facts of a store, or of one in the making."""
    try:
        stored = json.loads(path.read_bytes())
        if stored["version"] != VERSION:
            raise UserError(
                f"{path} is of format {stored['version']}, this program reads {VERSION}. Make the store "
                "again."
            )
        shards = tuple(Shard(**shard) for shard in stored.pop("shards"))
        return _with_geometry(StoreFacts(**stored, shards=shards))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not describe a label store: {error}. Copy or make it again.") from None


def _with_geometry(facts: StoreFacts) -> StoreFacts:
    """Return facts whose geometry can be parsed: earlier stores of imported maps did not tell it."""
    if facts.geometry == UNKNOWN_GEOMETRY:
        geometry = assumed_geometry(facts.height, facts.width)
    elif facts.geometry == CENTRE_CROP:  # without numbers: the square as long as the shorter side
        geometry = PUBLISHED
    else:
        MapGeometry.parse(facts.geometry)
        return facts
    return replace(facts, geometry=str(geometry), geometry_assumed=True)


def read_shard(folder: Path, facts: StoreFacts, number: int) -> Maps:
    """Return a shard's arrays, mapped from the file, not read; BadSampleError where it is damaged."""
    shard = facts.shards[number]
    path = folder / shard.file
    try:
        # As tensors, what the file holds is mapped without a copy, and no descriptor stays open.
        with safe_open(path, framework="pt") as file:
            scores, ids = (file.get_tensor(name).numpy() for name in ("scores", "ids"))
    except (OSError, SafetensorError) as error:
        raise BadSampleError(f"the shard {path} of label maps cannot be read: {error}") from None
    shape = (shard.rows, *facts.size)
    if (scores.shape, ids.shape, scores.dtype, ids.dtype) != (shape, shape, np.float16, np.dtype(facts.ids)):
        raise BadSampleError(f"the shard {path} holds other arrays than {DESCRIPTION} says")
    return scores, ids


class LabelStore:
    """A store, read by the places of a catalog's images; any thread may read."""

    def __init__(self, folder: str | Path, catalog: Catalog, cache: Path | None) -> None:
        self._folder = Path(folder)
        self._catalog = catalog
        self.facts = read_facts(self._folder / DESCRIPTION)
        self.size = self.facts.size
        self.geometry = MapGeometry.parse(self.facts.geometry)
        self.geometry_assumed = self.facts.geometry_assumed
        self.recorded_geometry = None if self.geometry_assumed else self.geometry
        _check_number(self._folder, self.facts, catalog)
        self._rows = self._find_rows(cache)
        self._shard_rows = self.facts.shard_rows
        self._classes = self.facts.classes
        # Read as a number without sign NO_CLASS is the largest: one comparison finds whatever is no class.
        self._unsigned = np.dtype(self.facts.ids.replace("int", "uint"))
        self._opened: dict[int, Maps] = {}
        self._opening = Lock()

    def read(self, index: int) -> Maps:
        """Return the scores and class numbers of an image, (k, height, width) each."""
        row = index if self._rows is None else int(self._rows[index])
        number, place = divmod(row, self._shard_rows)
        maps = self._opened.get(number)
        if maps is None:
            maps = self._open(number, index)
        scores, ids = maps[0][place].copy(), maps[1][place].copy()
        if np.maximum.reduce(ids.view(self._unsigned).ravel()) >= self._classes:
            raise self._unusable(ids, index)
        return scores, ids

    def close(self) -> None:
        """Let go of the mapped files; maps already read stay valid."""
        self._opened = {}

    def _open(self, number: int, index: int) -> Maps:
        if number < 0:
            raise self._missing(index)
        with self._opening:
            if number not in self._opened:
                self._opened[number] = read_shard(self._folder, self.facts, number)
            return self._opened[number]

    def _missing(self, index: int) -> BadSampleError:
        return BadSampleError(f"the store {self._folder} has no label map of {self._catalog.name(index)}")

    def _unusable(self, ids: NDArray[np.integer[Any]], index: int) -> BadSampleError:
        if (ids == NO_CLASS).all():
            return self._missing(index)
        return BadSampleError(
            f"the label map of {self._catalog.name(index)} in {self._folder} names classes that are none "
            f"of the {self._classes}: its shard is damaged"
        )

    def _find_rows(self, cache: Path | None) -> NDArray[np.int32] | None:
        if self.facts.catalog == self._catalog.digest:
            return None  # row i is image i
        rows = rows_of(self._catalog, self._folder / KEYS, self.facts.keys, cache)
        _check_classes(self._folder, rows, self._catalog)
        return rows


def _check_number(folder: Path, facts: StoreFacts, catalog: Catalog) -> None:
    if facts.classes != len(catalog.classes):
        raise UserError(
            f"the label maps in {folder} are of {facts.classes} classes, the training images of "
            f"{len(catalog.classes)}. Point --token-label-data at maps made for these images."
        )


def _check_classes(folder: Path, rows: NDArray[np.int32], catalog: Catalog) -> None:
    """Refuse a store that has no map for any image of some class."""
    present = np.bincount(catalog.targets, minlength=len(catalog.classes))
    labelled = np.bincount(catalog.targets[rows != NO_ROW], minlength=len(catalog.classes))
    bare = np.flatnonzero((present > 0) & (labelled == 0))
    if len(bare):
        raise UserError(
            f"the store {folder} has no label map for any image of class {catalog.classes[bare[0]]}"
            + (f" and of {len(bare) - 1} more classes" if len(bare) > 1 else "")
            + ". It was made for other images: point --token-label-data at maps made for these, or make them "
            "with tools/labels."
        )
