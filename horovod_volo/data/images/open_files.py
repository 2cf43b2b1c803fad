"""Files kept open for reading at any place, by any thread.

Invariant: a descriptor is closed when the last reader lets go of its file, never before, so an
eviction cannot close a file under another thread's read.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path


class OpenFile:
    """One open descriptor, closed with the last reference to it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes at a place; fewer than `length` only where the file ends."""
        return read_at(self.descriptor, offset, length)

    def __del__(self) -> None:
        os.close(self.descriptor)


class OpenFiles:
    """The files read last, open."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._files: OrderedDict[Path, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path) -> OpenFile:
        """Return the file, open; raise OSError where that fails."""
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                return file
        file = OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))  # may take long: not under the lock
        with self._lock:
            file = self._files.setdefault(path, file)  # another thread may have been faster
            while len(self._files) > self._limit:
                self._files.popitem(last=False)
        return file

    def clear(self) -> None:
        """Let go of all files."""
        with self._lock:
            self._files.clear()


def read_at(descriptor: int, offset: int, length: int) -> bytes:
    """Return the bytes at a place; fewer than `length` only where the file ends."""
    data = os.pread(descriptor, length, offset)
    if len(data) in (0, length):
        return data
    parts = [data]
    while data and length > (got := sum(map(len, parts))):  # a file system may give less than asked for
        data = os.pread(descriptor, length - got, offset + got)
        parts.append(data)
    return b"".join(parts)
