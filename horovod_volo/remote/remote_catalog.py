"""The images of shards on a server. The list that was published beside the shards says where each image is.

Invariant: the list is the one that the shards have on a local disk, with the same digest. So order, samples
and resuming do not depend on where the shards are.
"""

import hashlib
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from horovod_volo.config.data_settings import Data
from horovod_volo.config.validation import check_address
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog, keep_list, open_catalog
from horovod_volo.data.images.catalog_file import CatalogEntry, OpenFile, open_file
from horovod_volo.data.images.split_folder import FOLDER_NAMES, PUBLISHED_CATALOG, HeldOut, Split
from horovod_volo.engine.classification_data import SERVERS, ImageSource
from horovod_volo.remote.remote_folder import SCHEMES, BlockCache, MissingError, RemoteFolder

_THREADS = 16  # that wait for the server
_WHOLE_FILE = 2**40  # bytes: more than it has


class RemoteCatalog(Catalog):
    """The images of a split whose shards are on a server."""

    def __init__(self, file: OpenFile, path: Path | None, url: str, cache: Data) -> None:
        """Take the list in an open file; `url` is the folder of the shards."""
        super().__init__(file, path)
        metadata = self._file.metadata
        sizes = dict(zip(metadata["shards"], metadata.get("sizes", ()), strict=True))
        if not sizes:
            raise ValueError("not a list of shards")
        self._names, self.remote_bytes, self.source = list(sizes), sum(sizes.values()), url
        self._remote = RemoteFolder(url, sizes)
        blocks, limit = cache.cache_dir, int(cache.cache_gib * 2**30)
        self._cache = BlockCache(Path(blocks), limit) if blocks else None
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="remote-reader")
        self._announced: deque[dict[int, Future[bytes]]] = deque()  # a batch each
        self._lock = threading.Lock()

    def read_ahead(self, indices: NDArray[np.int64]) -> None:
        """Begin to read the images of a batch; batches are taken in the order in which they are announced."""
        read = super()._encoded
        with self._lock:
            self._announced.append({index: self._pool.submit(read, index) for index in indices.tolist()})

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        super().close()

    def _encoded(self, index: int) -> bytes:
        with self._lock:
            batch = next((batch for batch in self._announced if index in batch), None)
            while batch is not None and self._announced[0] is not batch:
                for dropped in self._announced.popleft().values():  # of an epoch that was not finished
                    dropped.cancel()
            ahead = None if batch is None else batch.pop(index)
        return super()._encoded(index) if ahead is None else ahead.result()

    def _shard_name(self, shard: int) -> str:
        return self._remote.url_of(self._names[shard])

    def _range_of_shard(self, entry: CatalogEntry) -> bytes:
        name = self._names[entry.shard]
        if not entry.length:  # servers refuse an empty range
            return b""
        if self._cache is None:
            return bytes(self._remote.read(name, entry.offset, entry.length))
        return self._cache.read(self._remote, name, entry.offset, entry.length)


_REMEDY = (
    f"`horovod-volo pack` writes {PUBLISHED_CATALOG} beside the shards it packs, with FOLDER --catalog "
    "beside others: copy it to the server too."
)


def download_catalog(
    data_dir: str, split: Split, held_out: HeldOut, folder: Path | None, cache: Data
) -> RemoteCatalog:
    """Download the list of a split into a folder, or into memory; raise UserError if there is none."""
    root, missing = data_dir.rstrip("/"), list[str]()
    check_address(root)
    for name in (held_out.folder,) if split == "val" and held_out.folder else FOLDER_NAMES[split]:
        url = f"{root}/{name}"
        try:
            content = bytes(RemoteFolder(url).read(PUBLISHED_CATALOG, 0, _WHOLE_FILE))
            break
        except MissingError as error:
            missing.append(str(error))
    else:
        raise UserError(f"{root} has no list of shards: {' '.join(missing)} {_REMEDY}")
    path = folder and folder / f"{split}-{hashlib.sha256(url.encode()).hexdigest()[:12]}.catalog"
    try:
        if path and path.exists() and path.read_bytes() == content:  # another run may have it open
            return RemoteCatalog(open_file(path), path, url, cache)
        return RemoteCatalog(keep_list(lambda file: file.write(content), path), path, url, cache)
    except ValueError:
        raise UserError(
            f"{url}/{PUBLISHED_CATALOG} is damaged, of another version, or not of shards. {_REMEDY}"
        ) from None
    except OSError as error:
        raise UserError(
            f"the list of {url} cannot be kept in {folder}: {error.strerror}. Name another --catalog-dir."
        ) from error


def open_downloaded(path: Path, digest: str, url: str, cache: Data) -> RemoteCatalog:
    """Open the list of a split that another rank has downloaded."""
    open_catalog(path, digest)  # it is the same list, or an error
    return RemoteCatalog(open_file(path), path, url, cache)


for _scheme in SCHEMES:
    SERVERS.register(_scheme.removesuffix("://"), ImageSource(download_catalog, open_downloaded))
