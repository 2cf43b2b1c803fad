"""A cache of open files, read at any offset by any thread.

Invariant: a descriptor is closed with the last reference to its file, so that an eviction cannot close a file
which another thread is reading.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path


class OpenFile:
    """An open file descriptor, closed with the last reference."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`; fewer only at the end of the file."""
        return read_at(self.descriptor, offset, length)

    def __del__(self) -> None:
        os.close(self.descriptor)


class OpenFiles:
    """The most recently used files, kept open."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._files: OrderedDict[Path, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path) -> OpenFile:
        """Open the file, or return it from the cache; raise OSError if that fails."""
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                return file
        file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))  # can be slow, so not under the lock
        with self._lock:
            file = self._files.setdefault(path, file)  # another thread may have opened it meanwhile
            while len(self._files) > self._limit:
                self._files.popitem(last=False)
        return file

    def clear(self) -> None:
        """Drop all files."""
        with self._lock:
            self._files.clear()


def read_at(descriptor: int, offset: int, length: int) -> bytes:
    """Return `length` bytes from `offset`; fewer only at the end of the file."""
    data = os.pread(descriptor, length, offset)
    if len(data) in (0, length):
        return data
    parts = [data]
    while data and length > (got := sum(map(len, parts))):  # a file system may return fewer bytes
        data = os.pread(descriptor, length - got, offset + got)
        parts.append(data)
    return b"".join(parts)
