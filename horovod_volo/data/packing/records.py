"""Lists and reads TFRecord shards in ImageNet's layout and MXNet's RecordIO shards, to convert them.

TFRecord: a record is its length, a checksum of the length, an Example, a checksum of the Example. An Example
is a protocol buffer that maps feature names to lists of values.

RecordIO: a record is magic, a word of 3 bits (part mark) and 29 bits (length), the content, padding to 4
bytes. Where the content has the magic at a multiple of 4, the writer splits it there and omits the magic; the
parts are marked as first, middle and last. The content is a header and an encoded image.

Checksums and indexes beside shards are not read: a conversion reads every record to its end.
"""

import mmap
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from horovod_volo.data.images.catalog import LISTERS, Catalog, open_catalog
from horovod_volo.data.images.catalog_file import Label, open_file
from horovod_volo.data.images.split_folder import Format
from horovod_volo.data.images.tar_shards import ShardSample, damaged, list_shards
from horovod_volo.data.reading import START_BYTES, ending_of

_IMAGE, _NAME = b"image/encoded", b"image/filename"
_LABEL, _CLASS = b"image/class/label", b"image/class/synset"
_LENGTH = struct.Struct("<QI")  # of the Example, and the checksum of these 8 bytes
_CHECKSUM_BYTES = 4
_LARGEST_LABEL = 2**31 - 1
_FIXED_BYTES = {1: 8, 5: 4}  # of a field, by the kind in its tag

_MAGIC = 0xCED7230A
_PART = struct.Struct("<II")
_LENGTH_BITS = 29
_WHOLE, _LAST = 0, 3  # marks of parts
_HEADER = struct.Struct("<IfQQ")  # number of additional labels, label, two image ids
_ADDITIONAL = struct.Struct("<f")
_MANTISSA_BITS = 24  # integers below 2**24 are exact in float32

Bytes = mmap.mmap | bytes
Range = tuple[int, int]  # first byte, and one past the last


class _RecordIOCatalog(Catalog):
    """A list of RecordIO shards; it has the range of a whole record for each image."""

    def _encoded(self, index: int) -> bytes:
        content, _ = _content(self._range_of_shard(self._file.entry(index)), 0)
        return _class_and_image(content)[1]


def open_records(path: Path, digest: str, form: Format) -> Catalog:
    """Open a list of shards of this format in another process."""
    catalog = open_catalog(path, digest)
    return _RecordIOCatalog(open_file(path), path) if form == "recordio" else catalog


def _mapped(shard: Path) -> Bytes:
    with shard.open("rb") as file:
        # An empty file cannot be mapped.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if shard.stat().st_size else b""


def _tfrecord_samples(shard: Path) -> Iterator[ShardSample]:
    data, stem = _mapped(shard), shard.name.split(".")[0]
    start = number = 0
    while start < len(data):
        try:
            example = _example(data, start)
            features = _features(data, example)
            label = _class_of_example(data, features)
            offset, end = features[_IMAGE]
            name = data[slice(*features[_NAME])].decode() if _NAME in features else ""
        except (KeyError, ValueError, struct.error) as error:
            raise damaged(shard, f"has no image with a class at byte {start}: {error}") from error
        if not name:
            name = f"{stem}-{number:06d}{ending_of(data[offset : offset + START_BYTES])}"
        yield ShardSample(label, name.rpartition("/")[2], offset, end - offset)
        start, number = example[1] + _CHECKSUM_BYTES, number + 1


def _example(data: Bytes, start: int) -> Range:
    """Return the range of the Example in the record at `start`."""
    length, _ = _LENGTH.unpack_from(data, start)
    first = start + _LENGTH.size
    if first + length + _CHECKSUM_BYTES > len(data):
        raise ValueError("the record is cut short")
    return first, first + length


def _varint(data: Bytes, start: int, end: int) -> Range:
    value = 0
    for position in range(start, min(end, start + 10)):
        value |= (data[position] & 0x7F) << 7 * (position - start)
        if data[position] < 0x80:
            return value, position + 1
    raise ValueError("a number is cut short")


def _fields(data: Bytes, message: Range) -> Iterator[tuple[int, Range]]:
    """Yield number and range of each field of a message."""
    start, end = message
    while start < end:
        tag, start = _varint(data, start, end)
        kind = tag & 7
        if kind == 0:
            field_end = _varint(data, start, end)[1]
        elif kind == 2:
            length, start = _varint(data, start, end)
            field_end = start + length
        elif kind in _FIXED_BYTES:
            field_end = start + _FIXED_BYTES[kind]
        else:
            raise ValueError(f"a field of kind {kind}")
        if field_end > end:
            raise ValueError("a field is cut short")
        yield tag >> 3, (start, field_end)
        start = field_end


def _field(data: Bytes, message: Range, number: int) -> Range:
    """Return the range of the first field with a number; empty if the message has none."""
    return next((found for each, found in _fields(data, message) if each == number), (0, 0))


def _features(data: Bytes, example: Range) -> dict[bytes, Range]:
    """Return the range of the first value of each feature in use: Example.features.feature[NAME]."""
    found: dict[bytes, Range] = {}
    for _, entry in _fields(data, _field(data, example, 1)):
        name = data[slice(*_field(data, entry, 1))]
        if name in (_IMAGE, _LABEL, _CLASS, _NAME):
            values = _field(
                data, _field(data, entry, 2), 3 if name == _LABEL else 1
            )  # of numbers, or of bytes
            found[name] = _field(data, values, 1)
    return found


def _class_of_example(data: Bytes, features: dict[bytes, Range]) -> Label:
    """Return the class name of an image if it has one, else its class number."""
    if name := data[slice(*features[_CLASS])] if _CLASS in features else b"":
        return name.decode()
    number, _ = _varint(data, *features[_LABEL])
    if number > _LARGEST_LABEL:
        raise ValueError(f"{number} is not the number of a class")
    return number


def _recordio_samples(shard: Path) -> Iterator[ShardSample]:
    """Yield the images of a shard in order; a first record without an image is skipped."""
    data, stem = _mapped(shard), shard.name.split(".")[0]
    start = number = 0
    while start < len(data):
        try:
            content, end = _content(data, start)
            label, image = _class_and_image(content)
        except ValueError as error:
            raise damaged(shard, f"is damaged at byte {start}: {error}") from error
        ending = ending_of(image[:START_BYTES])
        if number or ending:
            yield ShardSample(label, f"{stem}-{number:08d}{ending}", start, end - start)
        start, number = end, number + 1


def _content(data: Bytes, start: int) -> tuple[bytes, int]:
    """Return the joined content of the record at `start`, and the record's end."""
    parts, mark = [], -1
    while mark not in (_WHOLE, _LAST):
        first = start + _PART.size
        magic, word = _PART.unpack(data[start:first]) if first <= len(data) else (_MAGIC, len(data))
        mark, length = word >> _LENGTH_BITS, word & ((1 << _LENGTH_BITS) - 1)
        if magic != _MAGIC:
            raise ValueError("no record begins")
        if first + length > len(data):
            raise ValueError("the record is cut short")
        parts.append(data[first : first + length])
        start = first + -(-length // 4) * 4
    return struct.pack("<I", _MAGIC).join(parts), start


def _class_and_image(content: bytes) -> tuple[int, bytes]:
    """Return the class number and the image of a record."""
    if len(content) < _HEADER.size + _ADDITIONAL.size:
        raise ValueError("has no label and image")
    additional, label, _, _ = _HEADER.unpack_from(content)
    if additional:  # additional labels follow the header; the first one is the class
        (label,) = _ADDITIONAL.unpack_from(content, _HEADER.size)
    if not (label >= 0 and label.is_integer() and label < 2**_MANTISSA_BITS):
        raise ValueError(f"has {label}, not the number of a class")
    return int(label), content[_HEADER.size + _ADDITIONAL.size * additional :]


LISTERS.register("tfrecord", partial(list_shards, _tfrecord_samples))
LISTERS.register("recordio", partial(list_shards, _recordio_samples))
