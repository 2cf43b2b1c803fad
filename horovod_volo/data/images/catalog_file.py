"""The layout of a catalog file, its writer and its reader.

    header    fixed size: magic and version, number of images, offsets of the sections, digest, state
    checksum  SHA-256 of the sections below, then of the header
    names     the name of each image, terminated by a zero byte
    records   one RECORD for each image
    targets   one int32 for each image, aligned for memory-mapping
    metadata  JSON: class names, shards, source folder; sizes of the shards, in a published list

Invariant: the header is written last, so an incomplete file is never taken for a catalog. Every change of the
layout increments the version inside MAGIC; files of older versions are then written again.
"""

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = b"HVVCAT02"
HEADER = struct.Struct("<8s6Q32s32s")
STATE_BYTES = 32
START = HEADER.size + 32  # of the sections after the checksum
MAPPING_UNIT = 65536  # a multiple of every page size in use
READ_BYTES = 2**22  # at a time
AS_FILE, IN_SHARD = range(2)  # how the bytes of an image are stored
Label = int | str  # class number or name

# A sign of life from the listing of a million images; engine/run.py puts the watchdog's function here.
note_progress: Callable[[], object] = object  # does nothing: this process has no watchdog


class CatalogEntry(NamedTuple):
    """What is stored for one image besides its class."""

    name_start: int
    offset: int
    length: int
    shard: int
    name_length: int
    form: int  # AS_FILE or IN_SHARD


RECORD = np.dtype(list(zip(CatalogEntry._fields, ("<u8", "<u8", "<u4", "<u4", "<u2", "<u2"), strict=True)))


class OpenFile:
    """An open file, read at any offset by any thread. It is closed with the last reference."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`; fewer only at the end of the file."""
        data = os.pread(self.descriptor, length, offset)
        # A file system may return fewer bytes than are there.
        while len(data) < length and (
            more := os.pread(self.descriptor, length - len(data), offset + len(data))
        ):
            data += more
        return data

    @property
    def size(self) -> int:
        """Return the bytes in the file."""
        return os.fstat(self.descriptor).st_size

    def __del__(self) -> None:
        os.close(self.descriptor)


def open_file(path: Path) -> OpenFile:
    """Open a file for reading; raise OSError if that fails."""
    return OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


class CatalogWriter:
    """Writes a catalog into an open, empty file; it needs 32 bytes of memory for each image."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._position = START
        self._digest = hashlib.sha256()
        self._checksum = hashlib.sha256()
        self._records: list[NDArray[Any]] = []
        self._labels: list[NDArray[np.int32]] = []

    def add(
        self,
        labels: int | Sequence[int],
        names: Sequence[str],
        *,
        shard: int | None = None,
        offsets: int | Sequence[int] = 0,
        lengths: int | Sequence[int] = 0,
    ) -> None:
        """Write the names of images, which are files unless they are in a shard.

        A name is FILE, or CLASS/FILE where CLASS is not the class's name. `finish` writes the records, and
        maps labels to class numbers. A single label applies to all images.
        """
        note_progress()
        encoded = [os.fsencode(name) for name in names]
        records = np.zeros(len(encoded), dtype=RECORD)
        name_lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        records["name_start"] = self._position + np.cumsum(name_lengths + 1) - name_lengths - 1
        records["name_length"] = name_lengths
        records["shard"], records["form"] = (0, AS_FILE) if shard is None else (shard, IN_SHARD)
        records["offset"], records["length"] = offsets, lengths
        self._records.append(records)
        self._labels.append(np.full(len(encoded), labels, dtype=np.int32))
        self._write(b"".join(name + b"\0" for name in encoded), digested=True)

    def finish(
        self,
        classes: Sequence[str],
        numbers: Sequence[int],
        shards: Sequence[str],
        source: str,
        state: str,
        sizes: Sequence[int] = (),
    ) -> None:
        """Write the other sections and the header; images of label i have class numbers[i].

        `sizes` are the bytes of the shards, in a list that is published beside them.
        """
        images = sum(map(len, self._records))
        records_at = self._position
        for records in self._records:
            self._write(records.tobytes(), digested=False)
        self._write(bytes(-self._position % MAPPING_UNIT), digested=False)
        targets_at = self._position
        lookup = np.array(numbers, dtype="<i4")
        for labels in self._labels:
            self._write(lookup[labels].tobytes(), digested=True)
        metadata_at = self._position
        self._digest.update(json.dumps(classes).encode())
        metadata: dict[str, Any] = {"classes": list(classes), "shards": list(shards), "source": source}
        metadata |= {"sizes": list(sizes)} if sizes else {}
        self._write(json.dumps(metadata).encode(), digested=False)
        sections = (images, START, records_at, targets_at, metadata_at, self._position)
        header = HEADER.pack(MAGIC, *sections, self._digest.digest(), bytes.fromhex(state))
        self._checksum.update(header)
        os.pwrite(self._descriptor, header + self._checksum.digest(), 0)

    def _write(self, data: bytes, *, digested: bool) -> None:
        if digested:
            self._digest.update(data)
        self._checksum.update(data)
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, self._position)
            self._position += written
            view = view[written:]


class CatalogFile:
    def __init__(self, file: OpenFile) -> None:
        """Raise ValueError for another kind of file or version, and for a damaged file."""
        start = file.read(0, START)
        if len(start) < START or not start.startswith(MAGIC):
            raise ValueError("not a catalog")
        self.images: int
        _, self.images, _, self._records_at, targets_at, metadata_at, size, digest, state = (
            HEADER.unpack_from(start)
        )
        checksum = hashlib.sha256()
        for position in range(START, file.size, READ_BYTES):
            checksum.update(file.read(position, READ_BYTES))
        checksum.update(start[: HEADER.size])
        if file.size != size or start[HEADER.size :] != checksum.digest():
            raise ValueError("damaged")
        self.digest: str = digest.hex()  # identifies the images and their order
        self.state: str = state.hex()  # of the source at the time of listing
        self.metadata: dict[str, Any] = json.loads(file.read(metadata_at, size - metadata_at))
        # (images,) class numbers, memory-mapped
        self.targets: NDArray[np.int32] = np.frombuffer(
            mmap.mmap(file.descriptor, 4 * self.images, access=mmap.ACCESS_READ, offset=targets_at), "<i4"
        )
        self._file = file

    def entry(self, index: int) -> CatalogEntry:
        """Return what is stored for one image."""
        record = self._file.read(self._records_at + index * RECORD.itemsize, RECORD.itemsize)
        return CatalogEntry(*np.frombuffer(record, RECORD)[0].item())

    def name(self, entry: CatalogEntry) -> str:
        """Return the name that was written."""
        return os.fsdecode(self._file.read(entry.name_start, entry.name_length))
