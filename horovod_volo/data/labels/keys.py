"""Keys of label maps, and the rows of a packed store that belong to the images of a catalog.

The key of an image is "CLASS/STEM", where STEM is its file name up to the first dot, as in the names of the
published maps. The rows for a pair of catalog and store are computed once and cached beside the catalog.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog

NO_ROW = -1
_CHECKSUM_BYTES = hashlib.sha256().digest_size  # at the end of a cache, where NumPy does not read


def label_key(name: str) -> str:
    """Return the key of the image that a catalog names "CLASS/FILE"."""
    class_name, _, file = name.rpartition("/")
    return f"{class_name}/{file.partition('.')[0]}"


def catalog_keys(catalog: Catalog) -> list[str]:
    """Return the keys of all images, in the catalog's order."""
    return [label_key(catalog.name(index)) for index in range(len(catalog))]


def encode_keys(keys: Sequence[str]) -> bytes:
    """Return the content of a keys file: one key per line."""
    return "".join(f"{key}\n" for key in keys).encode(errors="surrogateescape")


def read_keys(path: Path) -> list[str]:
    """Read a keys file."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")[:-1]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}. Copy the store again.") from None


def find_rows(catalog: Catalog, keys_file: Path, keys_digest: str, cache: Path | None) -> NDArray[np.int32]:
    """Return the store's row for each image (images,), NO_ROW where it has no map.

    With a `cache` folder the rows are written there once and memory-mapped.
    """
    if cache is None:
        return _match_keys(catalog, keys_file, keys_digest)
    cached = cache / f"label_rows_{catalog.digest[:16]}_{keys_digest[:16]}.npy"
    if not _is_intact(cached):
        cache.mkdir(parents=True, exist_ok=True)
        rows = _match_keys(catalog, keys_file, keys_digest)
        with atomic_write(cached) as file:
            content = io.BytesIO()
            np.save(content, rows)
            file.write(content.getvalue() + hashlib.sha256(content.getvalue()).digest())
    # As a plain array: indexing a np.memmap takes a microsecond longer.
    mapped: NDArray[np.int32] = np.load(cached, mmap_mode="r").view(np.ndarray)
    return mapped


def _match_keys(catalog: Catalog, keys_file: Path, keys_digest: str) -> NDArray[np.int32]:
    keys = read_keys(keys_file)
    if hashlib.sha256(encode_keys(keys)).hexdigest() != keys_digest:
        raise UserError(f"{keys_file} is damaged: it does not match its checksum. Copy the store again.")
    row_of_key = {key: row for row, key in enumerate(keys)}
    rows = (row_of_key.get(label_key(catalog.name(index)), NO_ROW) for index in range(len(catalog)))
    return np.fromiter(rows, dtype=np.int32, count=len(catalog))  # (images,)


def _is_intact(path: Path) -> bool:
    """Return whether the last bytes of a cache are the checksum of the others."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return content[-_CHECKSUM_BYTES:] == hashlib.sha256(content[:-_CHECKSUM_BYTES]).digest()
