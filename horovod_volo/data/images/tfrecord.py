"""Reads TFRecord shards in ImageNet's layout.

A record is: its length, a checksum of the length, an Example, a checksum of the Example. An Example is a
protocol buffer that maps feature names to lists of values. Only class, name and offset of the image are read.
The second checksum is not verified, because that would read all images at start.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from horovod_volo.data.images.image_bytes import START_BYTES, ending_of
from horovod_volo.data.images.open_files import OpenFile
from horovod_volo.data.images.shard_sample import Label, ShardSample, damaged, record_ranges, wrong_index

_IMAGE, _LABEL, _CLASS, _NAME = (
    b"image/encoded",
    b"image/class/label",
    b"image/class/synset",
    b"image/filename",
)
_LENGTH = struct.Struct("<QI")  # of the Example, and the checksum of these 8 bytes
_CHECKSUM_BYTES = 4
_BUFFER_BYTES = 2048  # read at once; enough for most Examples without their image
_LARGEST_LABEL = 2**31 - 1

Range = tuple[int, int]  # offset and length in a file


def tfrecord_samples(shard: Path) -> Iterator[ShardSample]:
    """Yield the images of a shard in order."""
    file = OpenFile(os.open(shard, os.O_RDONLY | os.O_CLOEXEC))
    reader = _BufferedReader(file)
    stem = shard.name.split(".")[0]
    for number, (start, length) in enumerate(_examples(file, shard)):
        try:
            features = _features(reader, start, start + length)
            label = _label(reader, features)
            offset, size = features[_IMAGE]
            name = reader.read(*features[_NAME]).decode() if _NAME in features else ""
        except (KeyError, ValueError) as error:
            raise damaged(shard, f"has no image with a class at byte {start}: {error}") from error
        if not name:
            name = f"{stem}-{number:06d}{ending_of(file.read(offset, START_BYTES))}"
        yield ShardSample(label, name.rpartition("/")[2], offset, size)


def masked_checksum(data: bytes) -> int:
    """Return TFRecord's checksum: a CRC-32C, rotated and offset."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _crc_of_byte(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)  # Castagnoli's polynomial, bit-reversed
    return byte


_CRC_TABLE = [_crc_of_byte(byte) for byte in range(256)]


def _examples(file: OpenFile, shard: Path) -> Iterator[Range]:
    """Yield the ranges of the Examples of a shard."""
    size = os.fstat(file.descriptor).st_size
    around = _LENGTH.size + _CHECKSUM_BYTES
    records = record_ranges(
        shard, size, _indexed_starts, lambda start: start + around + _length(file, start, size)
    )
    return ((start + _LENGTH.size, end - start - around) for start, end in records)


def _length(file: OpenFile, start: int, size: int) -> int:
    data = file.read(start, _LENGTH.size)
    if len(data) < _LENGTH.size:
        raise ValueError("the record is cut short")
    length, checksum = _LENGTH.unpack(data)
    if masked_checksum(data[:8]) != checksum:
        raise ValueError("the checksum is wrong")
    if start + _LENGTH.size + length + _CHECKSUM_BYTES > size:
        raise ValueError("the record is cut short")
    return int(length)


def _indexed_starts(index: Path) -> list[int]:
    """Return the sorted record offsets of an index, whose lines are "START SIZE"."""
    try:
        lines = [line.split() for line in index.read_text().splitlines() if line.strip()]
        return [start for start, _ in sorted((int(start), int(size)) for start, size in lines)]
    except ValueError:
        raise wrong_index(index, "has a line that is not an offset and a size") from None


class _BufferedReader:
    """Buffered reads of a file: one read serves several small fields."""

    def __init__(self, file: OpenFile) -> None:
        self._file = file
        self._start = 0
        self._data = b""

    def read(self, start: int, length: int) -> bytes:
        """Return `length` bytes from `start`."""
        at = start - self._start
        if at < 0 or at + length > len(self._data):
            self._start, self._data, at = start, self._file.read(start, max(length, _BUFFER_BYTES)), 0
        return self._data[at : at + length]

    def varint(self, start: int, end: int) -> tuple[int, int]:
        """Return a varint and its end."""
        value = shift = 0
        while start < end and shift < 64:
            (byte,) = self.read(start, 1)
            start += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, start
            shift += 7
        raise ValueError("a number is cut short")


def _fields(reader: _BufferedReader, start: int, end: int) -> Iterator[tuple[int, Range]]:
    """Yield number and range of each field of a message."""
    while start < end:
        tag, start = reader.varint(start, end)
        match tag & 7:
            case 0:
                length = reader.varint(start, end)[1] - start
            case 1:
                length = 8
            case 2:
                length, start = reader.varint(start, end)
            case 5:
                length = 4
            case other:
                raise ValueError(f"a field of kind {other}")
        if start + length > end:
            raise ValueError("a field is cut short")
        yield tag >> 3, (start, length)
        start += length


def _field(reader: _BufferedReader, range_: Range, number: int) -> Range:
    """Return the range of the first field with a number; empty if the message has none."""
    start, length = range_
    fields = _fields(reader, start, start + length)
    return next((found for number_, found in fields if number_ == number), (start, 0))


def _features(reader: _BufferedReader, start: int, end: int) -> dict[bytes, Range]:
    """Return the range of the first value of each feature in use: Example.features.feature[NAME]."""
    found: dict[bytes, Range] = {}
    features_start, features_length = _field(reader, (start, end - start), 1)
    for _, entry in _fields(reader, features_start, features_start + features_length):
        name = reader.read(*_field(reader, entry, 1))
        if name in (_IMAGE, _LABEL, _CLASS, _NAME):
            feature = _field(reader, entry, 2)
            values = _field(reader, feature, 3 if name == _LABEL else 1)  # of numbers, or of bytes
            found[name] = _field(reader, values, 1)
    return found


def _label(reader: _BufferedReader, features: dict[bytes, Range]) -> Label:
    """Return the class name of an image if it has one, else its class number."""
    if name := reader.read(*features[_CLASS]) if _CLASS in features else b"":
        return name.decode()
    start, length = features[_LABEL]
    number, _ = reader.varint(start, start + length)
    if number > _LARGEST_LABEL:
        raise ValueError(f"{number} is not the number of a class")
    return number
