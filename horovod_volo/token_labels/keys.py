"""Keys of label maps, and the rows of a packed store that belong to the images of a catalog.

Generated maps are found by the full names of their images. Published maps and stores imported from them, or
written by earlier versions, only have "CLASS/STEM", where STEM is the file name up to the first dot. The rows
for a pair of catalog and store are computed once and cached beside the catalog.

Invariant: no two images have the same map.
"""

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError

NO_ROW = -1
_CHECKSUM_BYTES = hashlib.sha256().digest_size  # at the end of a cache, where NumPy does not read


class NamedImages(Protocol):
    """The list of images that maps are found for: the Catalog of data/images."""

    classes: tuple[str, ...]
    targets: NDArray[np.int32]  # (images,) the class of each image
    digest: str
    source: str  # the folder, for messages
    in_shards: bool

    def name(self, index: int) -> str:
        """Return the name of an image, CLASS/FILE."""

    def __len__(self) -> int: ...


def label_key(name: str) -> str:
    """Return the published key of the image that a catalog names "CLASS/FILE"."""
    class_name, _, file = name.rpartition("/")
    return f"{class_name}/{file.partition('.')[0]}"


def names_of(*catalogs: NamedImages) -> Iterator[str]:
    """Yield the names of all images, in the catalogs' order."""
    return (catalog.name(index) for catalog in catalogs for index in range(len(catalog)))


def catalog_keys(catalog: NamedImages) -> list[str]:
    """Return the published keys of all images, in the catalog's order; raise UserError if two are equal."""
    check_published_keys(catalog)
    return [label_key(name) for name in names_of(catalog)]


def check_published_keys(*catalogs: NamedImages) -> None:
    """Raise UserError if two images have the same published key. Only hashes of the keys are in memory."""
    hashes = (hash(label_key(name)) for name in names_of(*catalogs))
    _check_unshared(np.fromiter(hashes, np.int64), *catalogs)


def _check_unshared(maps: NDArray[np.integer[Any]], *catalogs: NamedImages) -> None:
    """Raise UserError if two images have the same map; `maps` (images,) has a number for each one's map."""
    order = np.argsort(maps, kind="stable")
    ascending = maps[order]
    shared = np.flatnonzero((ascending[1:] == ascending[:-1]) & (ascending[1:] != NO_ROW))
    if len(shared):
        names = list(names_of(*catalogs))
        first, second = (names[place] for place in order[shared[0] : shared[0] + 2])
        raise UserError(
            f"{first} and {second} in {catalogs[0].source} have the same label map, because their names are "
            "equal up to the first dot. Generate maps of these images with horovod-volo labels generate."
        )


def encode_keys(keys: Sequence[str]) -> bytes:
    """Return the content of a keys file: one key per line."""
    return "".join(f"{key}\n" for key in keys).encode(errors="surrogateescape")


def read_keys(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode(errors="surrogateescape").split("\n")[:-1]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}. Copy the store again.") from None


def find_rows(
    catalog: NamedImages, keys_file: Path, keys_digest: str, cache: Path | None, *, by_name: bool
) -> NDArray[np.int32]:
    """Return the store's row for each image (images,), NO_ROW where it has no map.

    `by_name`: the store's keys are full names, else published ones. With a `cache` folder the rows are
    written there once and memory-mapped.
    """
    if cache is None:
        return _match_keys(catalog, keys_file, keys_digest, by_name)
    rule = ("packed_name" if catalog.in_shards else "full_name") if by_name else "published_key"
    cached = cache / f"label_rows_by_{rule}_{catalog.digest[:16]}_{keys_digest[:16]}.npy"
    if not _is_intact(cached):
        rows, content = _match_keys(catalog, keys_file, keys_digest, by_name), io.BytesIO()
        np.save(content, rows)
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with atomic_write(cached) as file:
                file.write(content.getvalue() + hashlib.sha256(content.getvalue()).digest())
        except OSError:  # a folder for reading alone, or a full disk
            return rows
    # As a plain array: indexing a np.memmap takes a microsecond longer.
    mapped: NDArray[np.int32] = np.load(cached, mmap_mode="r").view(np.ndarray)
    return mapped


def _match_keys(catalog: NamedImages, keys_file: Path, keys_digest: str, by_name: bool) -> NDArray[np.int32]:
    keys = read_keys(keys_file)
    if hashlib.sha256(encode_keys(keys)).hexdigest() != keys_digest:
        raise UserError(f"{keys_file} is damaged: it does not match its checksum. Copy the store again.")
    row_of_key = {key: row for row, key in enumerate(keys)}
    own_keys = (name if by_name else label_key(name) for name in names_of(catalog))
    rows = np.fromiter((row_of_key.get(key, NO_ROW) for key in own_keys), np.int32, len(catalog))  # (images,)
    if by_name and catalog.in_shards:  # packing appends an ending where it encodes an image again
        missing = np.flatnonzero(rows == NO_ROW)
        shorter = (catalog.name(index).rpartition(".")[0] for index in missing.tolist())
        found = np.fromiter((row_of_key.get(key, NO_ROW) for key in shorter), np.int32, len(missing))
        rows[missing] = np.where(np.isin(found, rows), NO_ROW, found)  # the shorter name may be an image's
    _check_unshared(rows, catalog)
    if len(row_of_key) < len(keys):
        raise UserError(
            f"{keys_file} has a key twice, of images whose names are equal up to the first dot. Generate the "
            "store again."
        )
    return rows


def _is_intact(path: Path) -> bool:
    """Return whether the last bytes of a cache are the checksum of the others."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_CHECKSUM_BYTES:] == hashlib.sha256(content[:-_CHECKSUM_BYTES]).digest()
