"""Label maps packed into a few large memory-mapped files; reading a map takes microseconds.

A store is a folder:

    store.json                metadata, with the SHA-256 of every file and of itself; written last, so that a
                              folder with this file is a complete store
    keys.txt                  the key of every row, one per line: its image's full name or published key
    maps-00000.safetensors    scores (rows, k, height, width) fp16, the logits, and
                              ids (rows, k, height, width) int16 or int32, the class numbers

All shards but the last have `shard_rows` rows. The row of an image without a map is NO_CLASS everywhere.
The checksums of shards, gigabytes, are compared by `check`; training checks the range of what it reads.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from horovod_volo.core.atomic_file import json_sha256
from horovod_volo.core.batch import NO_CLASS
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.token_labels.geometry import CENTRE_CROP, PUBLISHED, MapGeometry, assumed_geometry
from horovod_volo.token_labels.keys import NO_ROW, NamedImages, find_rows

METADATA_FILE = "store.json"
UNFINISHED_FILE = "making.json"  # the metadata of a store that is not finished
KEYS_FILE = "keys.txt"
VERSION = 1
UNKNOWN_GEOMETRY = "unknown"  # in stores that were imported before the geometry was recorded
_CHECKSUM = "checksum"  # the last entry of store.json; earlier versions wrote none
_EXPONENT = np.uint16(0x7C00)  # of fp16; all its bits are set in an infinity and in a NaN

Maps = tuple[NDArray[np.float16], NDArray[np.integer[Any]]]  # logits and class numbers, of equal shapes


@dataclass(frozen=True)
class Shard:
    file: str
    first: int  # number of its first row in the store
    rows: int
    missing: int  # rows without a map
    sha256: str


@dataclass(frozen=True)
class StoreMetadata:
    """Metadata of a store; the fields of store.json."""

    version: int
    maps: int  # rows, including those without a map
    classes: int
    top: int
    height: int
    width: int
    ids: str
    geometry: str  # a MapGeometry as text
    teacher: str
    keys: str  # SHA-256 of keys.txt
    catalog: str  # digest of the catalog if the rows are its images in its order; else empty
    shard_rows: int
    shards: tuple[Shard, ...]
    geometry_assumed: bool = False  # neither recorded nor stated at import
    # The keys are full names and the logits centred. False: published keys and the teacher's own logits, of
    # imported maps and, in earlier versions, of generated ones.
    generated: bool = False

    @property
    def map_shape(self) -> tuple[int, int, int]:
        """Return k, height and width of every map."""
        return self.top, self.height, self.width

    def to_json(self) -> bytes:
        """Return the content of store.json."""
        fields = asdict(self)
        return (json.dumps(fields | {_CHECKSUM: json_sha256(fields)}, indent=2) + "\n").encode()


def ids_type(classes: int) -> str:
    """Return the name of the smallest integer type that holds every class number and NO_CLASS."""
    return "int16" if classes <= np.iinfo(np.int16).max else "int32"


def is_store(folder: Path) -> bool:
    """Return whether a folder is a complete store."""
    return (folder / METADATA_FILE).is_file()


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder is an unfinished store."""
    return (folder / UNFINISHED_FILE).is_file() and not is_store(folder)


def read_metadata(path: Path) -> StoreMetadata:
    """Read the metadata of a store or of an unfinished one."""
    try:
        stored = json.loads(path.read_bytes())
        if stored["version"] != VERSION:
            raise UserError(
                f"{path} has format version {stored['version']}, this program reads {VERSION}. Import or "
                "generate the store again."
            )
        checksum = stored.pop(_CHECKSUM, None)
        if checksum is not None and checksum != json_sha256(stored):
            raise ValueError("it does not match its checksum")
        shards = tuple(Shard(**shard) for shard in stored.pop("shards"))
        metadata = StoreMetadata(**stored, shards=shards)
        _check_layout(metadata)
        return _with_geometry(metadata)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is not the metadata of a label store: {error}. Copy the store again, or make it again."
        ) from None


def _check_layout(metadata: StoreMetadata) -> None:
    """Raise ValueError or TypeError if the numbers contradict one another."""
    firsts, shards = range(0, metadata.maps, metadata.shard_rows), metadata.shards
    if shards and (len(firsts) != len(shards) or list(firsts) != [shard.first for shard in shards]):
        raise ValueError("its shards do not hold its maps")
    if metadata.ids != ids_type(metadata.classes) or not all(length > 0 for length in metadata.map_shape):
        raise ValueError("its maps have no such form")


def _with_geometry(metadata: StoreMetadata) -> StoreMetadata:
    """Replace the geometry of stores that were imported before it was recorded by the assumed one."""
    if metadata.geometry == UNKNOWN_GEOMETRY:
        geometry = assumed_geometry(metadata.height, metadata.width)
    elif metadata.geometry == CENTRE_CROP:  # without RESIZE and SIZE: a square as long as the shorter side
        geometry = PUBLISHED
    else:
        MapGeometry.parse(metadata.geometry)
        return metadata
    return replace(metadata, geometry=str(geometry), geometry_assumed=True)


def read_shard(folder: Path, metadata: StoreMetadata, number: int) -> Maps:
    """Memory-map a shard and return its arrays; raise BadSampleError if it is damaged."""
    shard = metadata.shards[number]
    path = folder / shard.file
    try:
        # As torch tensors the arrays are memory-mapped without a copy, and no descriptor stays open.
        with safe_open(path, framework="pt") as file:
            scores, ids = (file.get_tensor(name).numpy() for name in ("scores", "ids"))
    except (OSError, SafetensorError) as error:
        raise BadSampleError(f"the shard {path} of label maps cannot be read: {error}") from None
    shape = (shard.rows, *metadata.map_shape)
    expected = (shape, shape, np.float16, np.dtype(metadata.ids))
    if (scores.shape, ids.shape, scores.dtype, ids.dtype) != expected:
        raise BadSampleError(f"the arrays in the shard {path} are not those that {METADATA_FILE} describes")
    return scores, ids


class LabelStore:
    """Read a store by the indices of a catalog's images. Thread-safe."""

    def __init__(self, folder: str | Path, catalog: NamedImages, cache: Path | None) -> None:
        self._folder = Path(folder)
        self._catalog = catalog
        self.metadata = read_metadata(self._folder / METADATA_FILE)
        self.map_shape = self.metadata.map_shape
        self.geometry = MapGeometry.parse(self.metadata.geometry)
        self.geometry_assumed = self.metadata.geometry_assumed
        self.teacher, self.generated = self.metadata.teacher, self.metadata.generated
        self.recorded_geometry = None if self.geometry_assumed else self.geometry
        if self.metadata.classes != len(catalog.classes):
            raise UserError(
                f"the label maps in {folder} have {self.metadata.classes} classes, the training images have "
                f"{len(catalog.classes)}. Point --token-label-data at maps that were made for these images."
            )
        self._rows = None  # row i is image i
        if not self.generated or self.metadata.catalog != catalog.digest:
            keys, digest = self._folder / KEYS_FILE, self.metadata.keys
            self._rows = find_rows(catalog, keys, digest, cache, by_name=self.generated)
            _check_classes(self._folder, self._rows, catalog)
        self._shard_rows = self.metadata.shard_rows
        self._classes = self.metadata.classes
        # As an unsigned integer NO_CLASS is the largest value, so one comparison finds every invalid class.
        self._unsigned = np.dtype(self.metadata.ids.replace("int", "uint"))
        self._open_shards: dict[int, Maps] = {}
        self._open_lock = Lock()

    def read(self, index: int) -> Maps:
        row = index if self._rows is None else int(self._rows[index])
        number, row_in_shard = divmod(row, self._shard_rows)
        maps = self._open_shards.get(number)
        if maps is None:
            maps = self._open_shard(number, index)
        scores, ids = maps[0][row_in_shard].copy(), maps[1][row_in_shard].copy()
        if np.maximum.reduce(ids.view(self._unsigned).ravel()) >= self._classes:
            if (ids == NO_CLASS).all():
                raise self._missing(index)
            raise self._damaged(f"class numbers outside the {self._classes} classes", index)
        if np.maximum.reduce((scores.view(np.uint16) & _EXPONENT).ravel()) == _EXPONENT:
            raise self._damaged("logits that are not finite", index)
        return scores, ids

    def close(self) -> None:
        self._open_shards = {}

    def _open_shard(self, number: int, index: int) -> Maps:
        if number < 0:
            raise self._missing(index)
        with self._open_lock:
            if number not in self._open_shards:
                self._open_shards[number] = read_shard(self._folder, self.metadata, number)
            return self._open_shards[number]

    def _missing(self, index: int) -> BadSampleError:
        return BadSampleError(f"the store {self._folder} has no label map of {self._catalog.name(index)}")

    def _damaged(self, what: str, index: int) -> BadSampleError:
        return BadSampleError(
            f"the label map of {self._catalog.name(index)} in {self._folder} has {what}: its shard is damaged"
        )


def _check_classes(folder: Path, rows: NDArray[np.int32], catalog: NamedImages) -> None:
    """Raise UserError if some class has images but no map for any of them."""
    present = np.bincount(catalog.targets, minlength=len(catalog.classes))
    labelled = np.bincount(catalog.targets[rows != NO_ROW], minlength=len(catalog.classes))
    unlabelled = np.flatnonzero((present > 0) & (labelled == 0))
    if len(unlabelled):
        raise UserError(
            f"the store {folder} has no label map for any image of class {catalog.classes[unlabelled[0]]}"
            + (f" and of {len(unlabelled) - 1} more classes" if len(unlabelled) > 1 else "")
            + ". It was made for other images: point --token-label-data at maps that were made for these, or "
            "generate them with horovod-volo labels."
        )
