"""By what name a label map is found, and in which row of a packed store the map of an image lies.

The key of an image is "CLASS/STEM", the stem being its file name up to the first dot: the published maps
are named so. Rows are looked up once for a pair of catalog and store and kept beside the catalog.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog

NO_ROW = -1


def key_of(name: str) -> str:
    """Return the key of the image that a catalog names "CLASS/FILE"."""
    class_name, _, file = name.rpartition("/")
    return f"{class_name}/{file.partition('.')[0]}"


def keys_of(catalog: Catalog) -> list[str]:
    """Return the keys of all images, in the catalog's order."""
    return [key_of(catalog.name(index)) for index in range(len(catalog))]


def text_of(keys: Sequence[str]) -> bytes:
    """Return keys as they are kept, one a line; what digests are taken of."""
    return "".join(f"{key}\n" for key in keys).encode(errors="surrogateescape")


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of some content, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def read_keys(path: Path) -> list[str]:
    """Read kept keys."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")[:-1]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}. Copy the store again.") from None


def rows_of(catalog: Catalog, keys_file: Path, keys_digest: str, cache: Path | None) -> NDArray[np.int32]:
    """Return the row of each image's map, NO_ROW where there is none; memory-mapped from `cache` if given."""
    if cache is None:
        return _looked_up(catalog, keys_file)
    kept = cache / f"label_rows_{catalog.digest[:16]}_{keys_digest[:16]}.npy"
    if not _holds_rows(kept, len(catalog)):
        cache.mkdir(parents=True, exist_ok=True)
        rows = _looked_up(catalog, keys_file)
        with atomic_write(kept) as file:
            np.save(file, rows)
    # As a plain array: looking up one row of a memmap costs a microsecond more.
    mapped: NDArray[np.int32] = np.load(kept, mmap_mode="r").view(np.ndarray)
    return mapped


def _looked_up(catalog: Catalog, keys_file: Path) -> NDArray[np.int32]:
    row_of = {key: row for row, key in enumerate(read_keys(keys_file))}
    found = (row_of.get(key_of(catalog.name(index)), NO_ROW) for index in range(len(catalog)))
    return np.fromiter(found, dtype=np.int32, count=len(catalog))  # (images,)


def _holds_rows(path: Path, images: int) -> bool:
    """Say whether a file has the rows of so many images: one written by another version has not."""
    try:
        rows = np.load(path, mmap_mode="r")
    except (OSError, ValueError):
        return False
    return bool(rows.shape == (images,) and rows.dtype == np.int32)
