"""Reads MXNet's RecordIO shards (.rec).

A record is: magic, a word of 3 bits (part mark) and 29 bits (length), the content, padding to 4 bytes. Where
the content has the magic at a multiple of 4, the writer splits it there and omits the magic; the parts are
marked as first, middle and last. The content is a header and an encoded image.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from horovod_volo.data.images.catalog_file import Form
from horovod_volo.data.images.image_bytes import START_BYTES, ending_of
from horovod_volo.data.images.open_files import OpenFile
from horovod_volo.data.images.shard_sample import ShardSample, damaged, record_ranges, wrong_index

MAGIC = 0xCED7230A
_PART = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")  # number of additional labels, label, two image ids
_LABEL = struct.Struct("<f")
_LENGTH_BITS = 29
_MANTISSA_BITS = 24  # integers below 2**24 are exact in float32
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_START_OF_CONTENT = 128  # bytes that contain label and image signature of most records


def recordio_samples(shard: Path) -> Iterator[ShardSample]:
    """Yield the images of a shard in order; a first record without an image is skipped."""
    file = OpenFile(os.open(shard, os.O_RDONLY | os.O_CLOEXEC))
    stem = shard.name.split(".")[0]
    for number, (start, end) in enumerate(_records(file, shard)):
        mark, length = _part(file.read(start, _PART.size))
        in_parts = mark != _WHOLE
        content_at = start + _PART.size
        content = (
            _joined(file.read(start, end - start))
            if in_parts
            else file.read(content_at, min(length, _START_OF_CONTENT))
        )
        try:
            label, image_at = _label(content)
        except ValueError as error:
            raise damaged(shard, f"{error} in the record at byte {start}") from None
        begins = content[image_at : image_at + START_BYTES] or file.read(content_at + image_at, START_BYTES)
        ending = ending_of(begins)
        if number == 0 and not ending:
            continue
        name = f"{stem}-{number:08d}{ending}"
        if in_parts:
            yield ShardSample(label, name, start, end - start, Form.PARTS)
        else:
            yield ShardSample(label, name, content_at + image_at, length - image_at)


def image_of_parts(record: bytes) -> bytes:
    """Return the image of a record in several parts; raise ValueError if the parts do not match."""
    content = _joined(record)
    return content[_label(content)[1] :]


def _label(content: bytes) -> tuple[int, int]:
    """Return the class number and the offset of the image."""
    if len(content) < _HEADER.size:
        raise ValueError("has no label")
    additional, label, _, _ = _HEADER.unpack_from(content)
    if additional:  # additional labels follow the header; the first one is the class
        if len(content) < _HEADER.size + _LABEL.size:
            raise ValueError("has no label")
        (label,) = _LABEL.unpack_from(content, _HEADER.size)
    if not (label >= 0 and label.is_integer() and label < 2**_MANTISSA_BITS):
        raise ValueError(f"has {label}, not the number of a class,")
    return int(label), _HEADER.size + _LABEL.size * additional


def _joined(record: bytes) -> bytes:
    """Join the parts of a record."""
    parts = []
    position = 0
    while True:
        mark, length = _part(record[position : position + _PART.size])
        position += _PART.size
        if position + length > len(record):
            raise ValueError("is cut short")
        parts.append(record[position : position + length])
        if mark in (_WHOLE, _LAST):
            return struct.pack("<I", MAGIC).join(parts)
        position += _padded(length)


def _records(file: OpenFile, shard: Path) -> Iterator[tuple[int, int]]:
    """Yield start and end of each record, with all its parts."""
    size = os.fstat(file.descriptor).st_size
    return record_ranges(shard, size, _indexed_starts, lambda start: _end(file, start, size))


def _end(file: OpenFile, start: int, size: int) -> int:
    """Return the end of the record at `start`, padding included."""
    position, mark = start, _FIRST
    while mark not in (_WHOLE, _LAST):
        mark, length = _part(file.read(position, _PART.size))
        if position == start and mark not in (_WHOLE, _FIRST):
            raise ValueError("no record begins")
        position += _PART.size + _padded(length)
        if position > size:
            raise ValueError("the record is cut short")
    return position


def _part(data: bytes) -> tuple[int, int]:
    """Return the mark and the length of a part."""
    if len(data) < _PART.size:
        raise ValueError("the record is cut short")
    magic, word = _PART.unpack(data)
    if magic != MAGIC:
        raise ValueError("no record begins")
    return word >> _LENGTH_BITS, word & ((1 << _LENGTH_BITS) - 1)


def _padded(length: int) -> int:
    return -(-length // 4) * 4


def _indexed_starts(index: Path) -> list[int]:
    """Return the sorted record offsets of an index, whose lines are "NUMBER<tab>START"."""
    try:
        return sorted(int(line.split("\t")[1]) for line in index.read_text().splitlines() if line.strip())
    except (ValueError, IndexError):
        raise wrong_index(index, "has a line that is not a number, a tab and an offset") from None
