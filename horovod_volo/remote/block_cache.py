"""Blocks of remote files on a local disk, up to a limit; several processes of a host may share the folder.

Invariant: a block appears by rename and ends with its checksum, so that one which a killed process or a power
failure left incomplete is read again. A block that is evicted stays readable for who has it open.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from horovod_volo.core.errors import UserError
from horovod_volo.remote.ranges import RemoteFile

BLOCK_BYTES = 2**22
_CHECKSUM_BYTES = 4
_LOCKS = 256
_LEFT = 0.9  # of the limit, after an eviction


class BlockCache:
    """A folder with blocks of files. All methods may be called by any thread."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._limit = folder, max(limit_bytes, 2 * BLOCK_BYTES)
        self._blocks, self._locks = folder / "blocks", folder / "locks"
        self._verified: set[Path] = set()
        self._has_counted = False
        try:
            for each in (self._blocks, self._locks):
                each.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unusable(error) from error

    def read(self, file: RemoteFile, offset: int, length: int) -> bytes:
        """Return bytes of a file, of which whole blocks are read and kept.

        A fault of the folder is a UserError: the samples are not damaged.
        """
        try:
            return self._read(file, offset, length)
        except OSError as error:
            raise self._unusable(error) from error

    def _read(self, file: RemoteFile, offset: int, length: int) -> bytes:
        folder = self._blocks / hashlib.sha256(file.identity().encode()).hexdigest()[:32]
        first, last = offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES
        parts = []
        for number in range(first, last + 1):
            start = max(0, offset - number * BLOCK_BYTES)
            end = min(BLOCK_BYTES, offset + length - number * BLOCK_BYTES)
            path = folder / str(number)
            part = self._kept(path, start, end)
            if part is None:
                fetch = partial(file.read, number * BLOCK_BYTES, BLOCK_BYTES)
                part = self._fetched(path, fetch, start, end)
            parts.append(part)
        return b"".join(parts)

    def _fetched(self, path: Path, fetch: Callable[[], bytes], start: int, end: int) -> bytes:
        """Read a block, unless another thread or process is doing so: then wait for it."""
        with self._locked(self._locks / str(zlib.crc32(str(path).encode()) % _LOCKS)):
            part = self._kept(path, start, end)
            if part is not None:
                return part
            block = fetch()
            self._keep(path, block)
            return block[start:end]

    def _kept(self, path: Path, start: int, end: int) -> bytes | None:
        """Return a part of a block; None if it is not here, or damaged."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._verified.discard(path)
            return None
        try:
            if path not in self._verified:
                content = os.pread(descriptor, BLOCK_BYTES + _CHECKSUM_BYTES, 0)
                if _checksum(content[:-_CHECKSUM_BYTES]) != content[-_CHECKSUM_BYTES:]:
                    return None
                self._verified.add(path)
            with suppress(OSError):
                os.utime(descriptor)  # the blocks that were not used for longest are evicted
            size = os.fstat(descriptor).st_size - _CHECKSUM_BYTES
            return os.pread(descriptor, min(end, size) - start, start)
        finally:
            os.close(descriptor)

    def _keep(self, path: Path, block: bytes) -> None:
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")  # its lock is held
        path.parent.mkdir(exist_ok=True)
        try:
            with self._locked(self._folder / "usage.lock"):
                self._make_room(len(block) + _CHECKSUM_BYTES)  # before it is written: the limit always holds
                unfinished.write_bytes(block + _checksum(block))
                unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        self._verified.add(path)

    def _make_room(self, added: int) -> None:
        """Evict blocks if the new one would exceed the limit. The caller has the lock of the usage."""
        usage = self._folder / "usage"
        used = (
            int(usage.read_text() or 0) if self._has_counted and usage.exists() else self._evict(self._limit)
        )
        self._has_counted = True  # what a killed process has not written is counted again at each start
        if used + added > self._limit:
            used = self._evict(int(_LEFT * self._limit) - added)
        usage.write_text(str(used + added))

    def _evict(self, limit: int) -> int:
        """Delete the blocks not used for longest until the rest is within a limit; return its size."""
        found = []
        for folder in self._blocks.iterdir():
            with os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
        used = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if used <= limit:
                break
            Path(path).unlink(missing_ok=True)
            used -= size
        return used

    @contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        """Hold the lock of a file, against other threads and other processes of this host."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _unusable(self, error: OSError) -> UserError:
        return UserError(
            f"the cache in {self._folder} cannot be used: {error.strerror}. Name a folder on a local disk "
            "with --cache-dir, or lower --cache-gib."
        )


def _checksum(block: bytes) -> bytes:
    return zlib.crc32(block).to_bytes(_CHECKSUM_BYTES, "little")
