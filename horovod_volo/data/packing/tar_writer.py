"""Write one tar shard in WebDataset layout, and the index beside it.

The bytes are a pure function of what is put in: no times, owners or places, so that checksums tell whether
two shards are the same.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from typing import BinaryIO

from horovod_volo.data.images.tar_shards import BLOCK_BYTES, INDEX_VERSION

_RECORD_BYTES = 20 * BLOCK_BYTES  # a tar file is a multiple of it


class TarWriter:
    """Writes samples, one after the other, into an open file."""

    def __init__(self, file: BinaryIO) -> None:
        self.bytes = 0
        self.images = 0
        self._file = file
        self._digest = hashlib.sha256()
        self._lines: list[str] = []
        self._indexable = True

    def add(self, image_name: str, image: bytes, target: int) -> None:
        """Add an image and its class number."""
        folder, _, base = image_name.rpartition("/")
        stem, _, ending = base.partition(".")
        key = f"{folder}/{stem}"
        text = str(target).encode()
        # An index parts its words by spaces, so that a name with spaces cannot stand in it.
        self._indexable &= image_name.split() == [image_name]
        image_at = self._append(image_name, image)
        text_at = self._append(f"{key}.cls", text)
        self._lines.append(
            f"{ending} {image_at} {len(image)} {image_name} cls {text_at} {len(text)} {key}.cls"
        )
        self.images += 1

    def finish(self) -> str:
        """End the tar file; return its sha256."""
        end = self.bytes + 2 * BLOCK_BYTES
        self._write(bytes(end - self.bytes + -end % _RECORD_BYTES))
        return self._digest.hexdigest()

    def index(self) -> bytes | None:
        """Return the index; None where the names allow none."""
        lines = [f"{INDEX_VERSION} {self.images}", *self._lines]
        return os.fsencode("\n".join(lines) + "\n") if self._indexable else None

    def _append(self, name: str, data: bytes) -> int:
        """Add a member; return where its bytes start."""
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


def member_bytes(size: int) -> int:
    """Return how much of a tar file a sample takes whose image has this size, about."""
    return 4 * BLOCK_BYTES + size
