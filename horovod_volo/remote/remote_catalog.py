"""The images of shards on a server. The list that was published beside the shards says where each image is.

Invariant: the list is the one that the shards have on a local disk, with the same digest. So order, samples
and resuming do not depend on where the shards are.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from horovod_volo.config.validation import check_address
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog, open_catalog, open_list
from horovod_volo.data.images.catalog_file import CatalogEntry, read_metadata
from horovod_volo.data.images.open_files import OpenFile
from horovod_volo.data.images.split_folder import FOLDER_NAMES, PUBLISHED_CATALOG, HeldOut, Split
from horovod_volo.remote.block_cache import BlockCache
from horovod_volo.remote.http_source import HttpSource
from horovod_volo.remote.ranges import MissingError, RangeSource, RefusedError, RemoteFile
from horovod_volo.remote.s3_source import S3Source

_SCHEMES = ("http://", "https://", "s3://")
_THREADS = 16  # that wait for the server
_GIB = 2**30


class CacheSettings(NamedTuple):
    """The folder for blocks of remote shards, and its limit; without a folder, each image is one request."""

    folder: str = ""
    gib: float = 0.0


class _Announced(NamedTuple):
    batch: int  # its number among those announced
    content: Future[bytes]


class ReadAhead:
    """Reads what is announced by threads of its own, until it is taken.

    Batches are taken in the order in which they are announced: with the first image of a later batch, what is
    left of earlier ones is dropped. It is of an epoch that was not finished.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="remote-reader")
        self._pending: OrderedDict[int, _Announced] = OrderedDict()
        self._batches = 0
        self._lock = threading.Lock()

    def expect(self, indices: NDArray[np.int64]) -> None:
        """Begin to read the images of a batch."""
        with self._lock:
            self._batches += 1
            for index in indices.tolist():
                if index not in self._pending:
                    self._pending[index] = _Announced(self._batches, self._pool.submit(self._read, index))

    def take(self, index: int) -> bytes:
        """Return an image, which is read now if it was not announced."""
        with self._lock:
            announced = self._pending.pop(index, None)
            if announced is not None:
                self._drop_before(announced.batch)
        return self._read(index) if announced is None else announced.content.result()

    def _drop_before(self, batch: int) -> None:
        """Drop what was announced in earlier batches. The caller has the lock."""
        while self._pending and next(iter(self._pending.values())).batch < batch:
            self._pending.popitem(last=False)[1].content.cancel()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)


class RemoteCatalog(Catalog):
    """The images of a split whose shards are on a server."""

    def __init__(self, file: OpenFile, path: Path | None, url: str, cache: CacheSettings) -> None:
        """Take the list in an open file; `url` is the folder of the shards."""
        super().__init__(file, path)
        metadata = read_metadata(file.descriptor, self._header)
        if not metadata.get("sizes"):
            raise UserError(f"{url}/{PUBLISHED_CATALOG} is not a list of shards. {_REMEDY}")
        self.source = url
        self.total_bytes: int = sum(metadata["sizes"])
        self._source = source_of(url)
        self._files = [
            RemoteFile(self._source, _url_of_shard(url, name), size)
            for name, size in zip(metadata["shards"], metadata["sizes"], strict=True)
        ]
        self._cache = BlockCache(Path(cache.folder), int(cache.gib * _GIB)) if cache.folder else None
        self._ahead = ReadAhead(super()._encoded)

    def read_ahead(self, indices: NDArray[np.int64]) -> None:
        """Begin to read images that are needed soon."""
        self._ahead.expect(indices)

    def close(self) -> None:
        """End the threads, and close all connections."""
        self._ahead.close()
        self._source.close()
        super().close()

    def _encoded(self, index: int) -> bytes:
        return self._ahead.take(index)

    def _shard_name(self, shard: int) -> str:
        return self._files[shard].url

    def _range_of_shard(self, record: CatalogEntry) -> bytes:
        file = self._files[record.shard]
        if self._cache is None:
            return file.read(record.offset, record.length)
        return self._cache.read(file, record.offset, record.length)


_REMEDY = (
    f"`tools/pack` writes {PUBLISHED_CATALOG} beside the shards it packs, and `tools/pack FOLDER --catalog` "
    "beside others: copy it to the server too."
)


def is_remote(data_dir: str) -> bool:
    """Return whether a data folder is on a server."""
    return data_dir.startswith(_SCHEMES)


def source_of(url: str) -> RangeSource:
    """Return what reads files at this address."""
    return S3Source() if url.startswith("s3://") else HttpSource()


def _url_of_shard(folder: str, name: str) -> str:
    """Return the address of a shard. Keys of S3 are written as they are; in HTTP, `#` or a space is not."""
    return f"{folder}/{name if folder.startswith('s3://') else quote(name)}"


def download_catalog(
    data_dir: str, split: Split, held_out: HeldOut, folder: Path | None, cache: CacheSettings
) -> RemoteCatalog:
    """Download the list of a split into a folder, or into memory; raise UserError if there is none."""
    chosen = split == "val" and held_out.folder
    names = (held_out.folder,) if chosen else FOLDER_NAMES[split]
    root, refused = data_dir.rstrip("/"), None
    check_address(root)
    for name in names:
        url = f"{root}/{name}"
        with closing(source_of(url)) as source:
            try:
                content = RemoteFile(source, f"{url}/{PUBLISHED_CATALOG}").read_all()
            except MissingError as error:
                refused = refused or (error if isinstance(error, RefusedError) else None)
                continue
        return _open(content, url, split, folder, cache)
    wanted = " or ".join(f"{name}/{PUBLISHED_CATALOG}" for name in names)
    raise refused or UserError(f"{root} has no {wanted}. {_REMEDY}")


def open_downloaded(path: Path, digest: str, url: str, cache: CacheSettings) -> RemoteCatalog:
    """Open the list of a split that another rank has downloaded."""
    open_catalog(path, digest)  # it is the same list, or an error
    return RemoteCatalog(open_list(path), path, url, cache)


def _open(content: bytes, url: str, split: Split, folder: Path | None, cache: CacheSettings) -> RemoteCatalog:
    try:
        if folder is None:
            memory = OpenFile(os.memfd_create("catalog", os.MFD_CLOEXEC))
            with os.fdopen(memory.descriptor, "wb", closefd=False) as file:
                file.write(content)
            return RemoteCatalog(memory, None, url, cache)
        path = folder / f"{split}-{hashlib.sha256(url.encode()).hexdigest()[:12]}.catalog"
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:  # another run may have it open
            with atomic_write(path) as written:
                written.write(content)
        return RemoteCatalog(open_list(path), path, url, cache)
    except ValueError:
        raise UserError(f"{url}/{PUBLISHED_CATALOG} is damaged, or of another version. {_REMEDY}") from None
    except OSError as error:
        raise UserError(
            f"the list of {url} cannot be kept in {folder}: {error.strerror}. Name another --catalog-dir."
        ) from error
