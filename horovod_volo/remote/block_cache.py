"""Blocks of remote files on a local disk, up to a limit; several processes of a host may share the folder.

It is no library's: fsspec's caches have no limit, and diskcache never deletes the files of killed processes.

Invariant: a block appears by rename and ends with its checksum, so that one which a killed process or a power
failure left incomplete is read again. A block that is evicted stays readable for who has it open.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog_file import OpenFile
from horovod_volo.remote.remote_folder import RemoteFolder

BLOCK_BYTES = 2**22
_CHECKSUM_BYTES = 4


class BlockCache:
    """A folder with blocks of files. Threads may share it."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self._folder, self._blocks = folder, folder / "blocks"
        self._limit = max(limit_bytes, 2 * BLOCK_BYTES)
        self._verified: set[Path] = set()

    def read(self, remote: RemoteFolder, name: str, offset: int, length: int) -> bytes:
        """Return bytes of a file, of which whole blocks are read and kept.

        A fault of the folder is a UserError: the samples are not damaged.
        """
        size, version = remote.size_and_version(name)
        identity = f"{remote.url_of(name)} {size} {version}"
        folder = self._blocks / hashlib.sha256(identity.encode()).hexdigest()[:32]
        parts, end = [], min(offset + length, size)
        try:
            for first in range(offset - offset % BLOCK_BYTES, end, BLOCK_BYTES):
                path = folder / str(first // BLOCK_BYTES)
                span = slice(max(0, offset - first), min(BLOCK_BYTES, end - first))
                part = self._read_kept(path, span)
                if part is None:
                    # One thread of all processes reads a block from the server; the others wait for it.
                    with self._locked(f"locks/{zlib.crc32(str(path).encode()) % 256}"):
                        part = self._read_kept(path, span)
                        if part is None:
                            block = remote.read(name, first, BLOCK_BYTES)
                            self._keep(path, block)
                            part = bytes(block[span])
                parts.append(part)
        except OSError as error:
            raise UserError(
                f"the cache in {self._folder} cannot be used: {error.strerror}. Name a folder on a local "
                "disk with --cache-dir, or lower --cache-gib."
            ) from error
        return b"".join(parts)

    def _read_kept(self, path: Path, span: slice) -> bytes | None:
        """Return a part of a block; None if the block is not in the folder, or damaged."""
        try:
            file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            self._verified.discard(path)
            return None
        if path not in self._verified:
            content = file.read(0, BLOCK_BYTES + _CHECKSUM_BYTES)
            if _checksum(content[:-_CHECKSUM_BYTES]) != content[-_CHECKSUM_BYTES:]:
                return None
            self._verified.add(path)
        with suppress(OSError):
            os.utime(file.descriptor)  # the blocks that were not used for longest are evicted
        return file.read(span.start, span.stop - span.start)

    def _keep(self, path: Path, block: memoryview) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.partial")  # its lock is held
        with self._locked("usage.lock"):
            self._make_room(len(block) + _CHECKSUM_BYTES)  # before it is written: the limit always holds
            with unfinished.open("wb") as file:
                file.writelines((block, _checksum(block)))
            unfinished.replace(path)
        self._verified.add(path)

    def _make_room(self, added: int) -> None:
        """Count a new block, and evict others if it would exceed the limit.

        A killed process leaves a number that is too large; the blocks are counted again when it is the limit.
        """
        usage, used = self._folder / "usage", self._limit
        with suppress(FileNotFoundError, ValueError):
            used = int(usage.read_text())
        if used + added > self._limit:
            blocks = [(path.stat(), path) for path in self._blocks.glob("*/*")]
            used = sum(status.st_size for status, _ in blocks)
            for status, path in sorted(blocks, key=lambda block: block[0].st_mtime_ns):
                if used + added <= 0.9 * self._limit:
                    break
                path.unlink()
                used -= status.st_size
        usage.write_text(str(used + added))

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold the lock of a file in the folder, against other threads and other processes of this host."""
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _checksum(block: bytes | memoryview) -> bytes:
    return zlib.crc32(block).to_bytes(_CHECKSUM_BYTES, "little")
