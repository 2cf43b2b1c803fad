"""Write small shards of each format by the formats' descriptions, without the package's code."""

import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

RECORDIO_MAGIC = struct.pack("<I", 0xCED7230A)


def picture(number: int, kind: str = "JPEG") -> bytes:
    """Return an encoded image that differs from those of other numbers."""
    data = io.BytesIO()
    Image.new("RGB", (16 + number, 12), (number * 40 % 256, number * 90 % 256, 99)).save(data, kind)
    return data.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]], *, form: int = tarfile.PAX_FORMAT) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def write_tar_index(path: Path) -> None:
    """Write an index as DALI's tool does: consecutive members with the same key form a sample."""
    samples: dict[str, list[str]] = {}
    with tarfile.open(path) as tar:
        for member in tar:
            key, _, ending = member.name.partition(".")
            samples.setdefault(key, []).append(f"{ending} {member.offset_data} {member.size} {member.name}")
    lines = [f"v1.2 {len(samples)}", *(" ".join(members) for members in samples.values())]
    path.with_suffix(".idx").write_text("\n".join(lines) + "\n")


def varint(number: int) -> bytes:
    data = b""
    while number > 127:
        data += bytes([number % 128 + 128])
        number //= 128
    return data + bytes([number])


def field(number: int, content: bytes) -> bytes:
    return varint(number * 8 + 2) + varint(len(content)) + content


def example(features: dict[str, bytes | int | float | str], *, packed: bool = True) -> bytes:
    """Return a tf.train.Example with one value per feature."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, int):
            number = varint(value)
            feature = field(3, field(1, number) if packed else varint(8) + number)
        elif isinstance(value, float):
            feature = field(2, field(1, struct.pack("<f", value)))
        else:
            feature = field(1, field(1, value if isinstance(value, bytes) else value.encode()))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)


def crc32c(data: bytes) -> int:
    """Return the checksum by its definition: bitwise division by Castagnoli's polynomial."""
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder ^= byte
        for _ in range(8):
            remainder = remainder // 2 ^ (0x82F63B78 if remainder % 2 else 0)
    return remainder ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def write_tfrecord(path: Path, examples: list[bytes], *, index: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data, lines = b"", []
    for content in examples:
        length = struct.pack("<Q", len(content))
        record = length + masked(length) + content + b"data"  # in place of a checksum that is not checked
        lines.append(f"{len(data)} {len(record)}\n")
        data += record
    path.write_bytes(data)
    if index:
        path.with_name(path.name.removesuffix(".tfrecord") + ".idx").write_text("".join(lines))


def recordio_content(label: float | list[float], number: int, image: bytes) -> bytes:
    labels = label if isinstance(label, list) else []
    plain = 0.0 if labels else label
    header = struct.pack("<IfQQ", len(labels), plain, number, 0)
    return header + b"".join(struct.pack("<f", one) for one in labels) + image


def write_recordio(path: Path, contents: list[bytes], *, index: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data, lines = b"", []
    for number, content in enumerate(contents):
        lines.append(f"{number}\t{len(data)}\n")
        data += b"".join(recordio_parts(content))
    path.write_bytes(data)
    if index:
        path.with_suffix(".idx").write_text("".join(lines))


def recordio_parts(content: bytes) -> list[bytes]:
    """Split the content at each magic number at a multiple of 4, which the parts leave out."""
    pieces, begin = [], 0
    for offset in range(0, len(content) - 3, 4):
        if content[offset : offset + 4] == RECORDIO_MAGIC:
            pieces.append(content[begin:offset])
            begin = offset + 4
    pieces.append(content[begin:])
    marks = [0] if len(pieces) == 1 else [1, *[2] * (len(pieces) - 2), 3]
    return [
        RECORDIO_MAGIC + struct.pack("<I", mark << 29 | len(piece)) + piece + bytes(-len(piece) % 4)
        for mark, piece in zip(marks, pieces, strict=True)
    ]


def open_files_under(folder: Path) -> int:
    """Return how many files under a folder this process has open."""
    opened = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
    return sum(Path(path).is_relative_to(folder) for path in opened)


def in_this_process(
    function: Callable[..., Any], tasks: Mapping[Any, Any], workers: int, on_result: Callable[..., None]
) -> None:
    """Pack shards in place of packed_split.run_in_processes."""
    del workers
    for name, arguments in tasks.items():
        on_result(name, function(*pickle.loads(pickle.dumps(arguments))))
