"""The layout of a catalog file, its writer and its readers.

    header    fixed size: magic and version, number of images, offsets of the sections, digest, state
    checksum  SHA-256 of the sections below, then of the header
    names     the name of each image, terminated by a zero byte
    records   one RECORD for each image
    targets   one int32 for each image, aligned for memory-mapping
    metadata  JSON: class names, shards, source folder; sizes of the shards, in a published list

Invariant: the header is written last, so an incomplete file is never taken for a catalog. Every change of the
layout increments the version inside MAGIC; files of older versions are then written again.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core import liveness
from horovod_volo.data.images.open_files import read_at

MAGIC = b"HVVCAT02"
HEADER = struct.Struct("<8s6Q32s32s")
STATE_BYTES = 32
START = HEADER.size + 32  # of the sections after the checksum
RECORD = struct.Struct("<QQIIHH")
RECORD_FIELDS = np.dtype(
    [
        ("name_start", "<u8"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("shard", "<u4"),
        ("name_length", "<u2"),
        ("form", "<u2"),
    ]
)
MAPPING_UNIT = 65536  # a multiple of every page size in use
READ_BYTES = 2**22  # at a time


class Form(IntEnum):
    """How the bytes of an image are stored."""

    FILE = 0  # as a file
    BYTES = 1  # as a range of bytes of a shard
    PARTS = 2  # as a range that is a RecordIO record in several parts


class CatalogEntry(NamedTuple):
    """The fields of RECORD: what is stored for one image besides its class."""

    name_start: int
    offset: int
    length: int
    shard: int
    name_length: int
    form: int


class Rows(NamedTuple):
    """Consecutive images to be written; a single number applies to all of them."""

    labels: int | Sequence[int]  # `finish` maps them to class numbers
    names: Sequence[str]  # FILE, or CLASS/FILE where CLASS is not the class's name
    shard: int = 0
    offsets: int | Sequence[int] = 0
    lengths: int | Sequence[int] = 0
    forms: int | Sequence[int] = Form.FILE


@dataclass(frozen=True)
class Header:
    """The header: offsets of the sections, and what identifies the contents."""

    images: int
    names_at: int
    records_at: int
    targets_at: int
    metadata_at: int
    size: int
    digest: str
    state: str  # of the source at the time of listing


class CatalogWriter:
    """Writes a catalog into an open, empty file; it needs 32 bytes of memory for each image."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._position = START
        self._digest = hashlib.sha256()
        self._checksum = hashlib.sha256()
        self._records: list[NDArray[Any]] = []
        self._labels: list[NDArray[np.int32]] = []

    def add(self, rows: Rows) -> None:
        """Write the names of images; their records are written by `finish`."""
        liveness.note_progress()
        names = [os.fsencode(name) for name in rows.names]
        records = np.zeros(len(names), dtype=RECORD_FIELDS)
        lengths = np.fromiter(map(len, names), dtype=np.int64, count=len(names))
        records["name_start"] = self._position + np.cumsum(lengths + 1) - lengths - 1
        records["name_length"] = lengths
        records["shard"] = rows.shard
        records["offset"] = rows.offsets
        records["length"] = rows.lengths
        records["form"] = rows.forms
        self._records.append(records)
        self._labels.append(np.full(len(names), rows.labels, dtype=np.int32))
        self._write(b"".join(name + b"\0" for name in names), digested=True)

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
        os.fsync(self._descriptor)  # the other sections reach the disk before the header
        os.pwrite(self._descriptor, header + self._checksum.digest(), 0)
        os.fsync(self._descriptor)

    def _write(self, data: bytes, *, digested: bool) -> None:
        if digested:
            self._digest.update(data)
        self._checksum.update(data)
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, self._position)
            self._position += written
            view = view[written:]


def read_header(descriptor: int) -> Header | None:
    """Return the header of an open catalog; None for another kind of file or version, or a damaged file."""
    data = os.pread(descriptor, START, 0)
    if len(data) < START or not data.startswith(MAGIC):
        return None
    _, images, names_at, records_at, targets_at, metadata_at, size, digest, state = HEADER.unpack_from(data)
    header = Header(
        images, names_at, records_at, targets_at, metadata_at, size, digest=digest.hex(), state=state.hex()
    )
    if os.fstat(descriptor).st_size != size:
        return None
    checksum = hashlib.sha256()
    for start in range(START, size, READ_BYTES):
        checksum.update(read_at(descriptor, start, READ_BYTES))
    checksum.update(data[: HEADER.size])
    return header if data[HEADER.size :] == checksum.digest() else None


def read_metadata(descriptor: int, header: Header) -> dict[str, Any]:
    """Return class names, shards and source."""
    metadata: dict[str, Any] = json.loads(
        read_at(descriptor, header.metadata_at, header.size - header.metadata_at).decode()
    )
    return metadata


def read_record(descriptor: int, header: Header, index: int) -> CatalogEntry:
    """Return the record of one image."""
    return CatalogEntry(
        *RECORD.unpack(os.pread(descriptor, RECORD.size, header.records_at + index * RECORD.size))
    )


def map_targets(descriptor: int, header: Header) -> NDArray[np.int32]:
    """Return the class numbers, (images,), memory-mapped."""
    mapped = mmap.mmap(descriptor, 4 * header.images, access=mmap.ACCESS_READ, offset=header.targets_at)
    return np.frombuffer(mapped, dtype="<i4")
