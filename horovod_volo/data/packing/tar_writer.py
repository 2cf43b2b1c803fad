"""Write one tar shard in WebDataset layout, and its index.

Invariant: the bytes depend only on the samples, not on times, owners or paths, so that equal shards have
equal checksums.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Iterable
from typing import BinaryIO

from horovod_volo.data.images.tar_shards import BLOCK_BYTES, INDEX_VERSION

_RECORD_BYTES = 20 * BLOCK_BYTES  # the size of a tar file is a multiple of it


class TarWriter:
    """Append samples to an open file."""

    def __init__(self, file: BinaryIO) -> None:
        self.bytes = 0
        self.images = 0
        self._file = file
        self._digest = hashlib.sha256()
        self._lines: list[str] = []
        self._indexable = True

    def add(self, *members: tuple[str, bytes]) -> None:
        """Add the names and contents of an image and of what belongs to it."""
        words = []
        for name, data in members:
            # The fields of an index are separated by spaces, so it cannot contain names with spaces.
            self._indexable &= name.split() == [name]
            ending = name.rpartition("/")[2].partition(".")[2]
            words.append(f"{ending} {self._append(name, data)} {len(data)} {name}")
        self._lines.append(" ".join(words))
        self.images += 1

    def finish(self) -> str:
        """Write the end of the tar file; return its SHA-256 in hexadecimal."""
        end = self.bytes + 2 * BLOCK_BYTES
        self._write(bytes(end - self.bytes + -end % _RECORD_BYTES))
        return self._digest.hexdigest()

    def index(self) -> bytes | None:
        """Return the content of the index; None if a name contains spaces."""
        lines = [f"{INDEX_VERSION} {self.images}", *self._lines]
        return os.fsencode("\n".join(lines) + "\n") if self._indexable else None

    def _append(self, name: str, data: bytes) -> int:
        """Append a member; return the offset of its content."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        self._write(member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
        start = self.bytes
        self._write(data + bytes(-len(data) % BLOCK_BYTES))
        return start

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.bytes += len(data)


def sample_bytes(members: Iterable[tuple[str, bytes]]) -> int:
    """Return the approximate bytes of an image and of what belongs to it in a tar file."""
    return sum(2 * BLOCK_BYTES + len(data) for _, data in members)
