"""Reads tar shards in WebDataset layout: KEY.jpg (or another image) followed or preceded by KEY.cls.

The key is the file name up to its first dot. A shard with an index beside it is not searched. The index is in
DALI's format: "v1.2 N", then one line per sample with ending, offset, size and name of each member.
The contents of members have no checksum; what is checked here is that every member is found.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog_file import Label, OpenFile, open_file
from horovod_volo.data.reading import IMAGE_ENDINGS

INDEX_VERSION = "v1.2"
MASK_ENDING = ".mask.png"  # of what follows an image for segmentation
BLOCK_BYTES = 512  # the unit of a tar file
_NAME, _SIZE, _MAGIC = slice(100), slice(124, 136), slice(257, 262)  # of a member's header
_END_BYTES = 2 * BLOCK_BYTES  # zeros that end a tar file
_LONGEST_END_BYTES = 2**20  # GNU tar pads to at most that; longer ones are damage
_LARGEST_CLASS = 2**31 - 1


class ShardSample(NamedTuple):
    """One image of a shard."""

    label: Label
    name: str
    offset: int
    length: int


ShardReader = Callable[[Path], Iterator[ShardSample]]  # yields the images of a shard in order


class Member(NamedTuple):
    """One file in a tar file; its content starts at `offset`, after its header."""

    name: str
    offset: int
    size: int


def tar_members(shard: Path, file: OpenFile) -> Iterator[Member]:
    """Yield the files of an open shard in order, from its index if it has one."""
    index = index_beside(shard)
    for member in _indexed(file, index) if index.is_file() else _searched(file, shard):
        check_name(shard, member.name)
        yield member


def tar_samples(shard: Path) -> Iterator[ShardSample]:
    """Yield the images of a shard in order."""
    file = open_file(shard)
    key, image, number = "", None, None
    for member in tar_members(shard, file):
        folder, _, base = member.name.removeprefix("./").rpartition("/")
        stem, _, ending = base.partition(".")
        if f".{ending}".endswith(MASK_ENDING):
            raise UserError(
                f"{shard} holds images with masks, not with classes. Train on them with --task segmentation."
            )
        is_image = f".{ending}".lower().endswith(IMAGE_ENDINGS)
        if not is_image and ending != "cls":
            continue
        here = f"{folder}/{stem}"
        if (image or number is not None) and (here != key or (is_image and image)):
            raise damaged(shard, f"has {key.lstrip('/')} without {'its .cls' if image else 'an image'}")
        key = here
        if is_image:
            image = member
        else:
            number = _class_number(file, shard, member)
        if image and number is not None:
            yield ShardSample(number, _name(image.name), image.offset, image.size)
            image, number = None, None
    if image or number is not None:
        raise damaged(shard, f"has {key.lstrip('/')} without {'its .cls' if image else 'an image'}")


def _name(member: str) -> str:
    """Return a member's file name with its parent folder."""
    return "/".join(member.removeprefix("./").split("/")[-2:])


def _class_number(file: OpenFile, shard: Path, member: Member) -> int:
    text = file.read(member.offset, member.size).strip()
    if not text.isdigit() or int(text) > _LARGEST_CLASS:
        shown = text[:20].decode(errors="replace")
        raise damaged(shard, f"has {member.name} with {shown!r}, not the number of a class")
    return int(text)


def _searched(file: OpenFile, shard: Path) -> Iterator[Member]:
    try:
        with tarfile.open(shard, mode="r:") as tar:
            while (found := tar.next()) is not None:
                tar.members = []  # type: ignore[attr-defined]  # it would hold every member in memory
                if found.isfile():
                    yield Member(found.name, found.offset_data, found.size)
            # tarfile ends in silence at a damaged header, and at the end of a cut file.
            rest = file.read(tar.offset, _LONGEST_END_BYTES + 1)
            if not tar.offset or rest.strip(b"\0") or not _END_BYTES <= len(rest) <= _LONGEST_END_BYTES:
                raise damaged(
                    shard, f"is cut or damaged: no member and no end of the file is at byte {tar.offset}"
                )
    except (tarfile.TarError, OSError) as error:
        raise damaged(shard, f"cannot be read to its end as a tar file: {error}") from error


def _indexed(file: OpenFile, index: Path) -> Iterator[Member]:
    with index.open(encoding="utf-8", errors="surrogateescape") as lines:
        version, *count = next(lines, "").split()[:2] or [""]
        if version != INDEX_VERSION:
            raise _wrong_index(index, f"does not begin with {INDEX_VERSION}")
        number = 0
        for number, line in enumerate(lines, 1):
            words = line.split()
            if len(words) % 4 or not all(word.isdigit() for word in words[1::4] + words[2::4]):
                raise _wrong_index(index, f"has no ending, offset, size and name in line {number + 1}")
            for _, offset, length, name in zip(*[iter(words)] * 4, strict=True):
                member = Member(name, int(offset), int(length))
                if member.offset + member.size > file.size:
                    raise _wrong_index(index, f"does not fit: {name} would lie beyond the end of the shard")
                if not _follows_its_header(file, member):
                    raise _wrong_index(index, f"does not fit: {name} is not where line {number + 1} says")
                yield member
    if count != [str(number)]:
        raise _wrong_index(index, f"lists {number} samples, but says {' '.join(count) or 'nothing'} of them")


def _follows_its_header(file: OpenFile, member: Member) -> bool:
    header = file.read(member.offset - BLOCK_BYTES, BLOCK_BYTES) if member.offset >= BLOCK_BYTES else b""
    named = header[_NAME].rstrip(b"\0")  # a long name is truncated at its start or end
    # PAX headers hold the whole name in an extended header, and "?" here for what is not ASCII.
    names = (os.fsencode(member.name), member.name.encode("ascii", "replace"))
    fits = bool(named) and any(name.startswith(named) or name.endswith(named) for name in names)
    has_size = header[_SIZE].strip(b"\0 ").zfill(11) == b"%011o" % member.size
    return header[_MAGIC] == b"ustar" and fits and has_size


def index_beside(shard: Path) -> Path:
    """Return the path of a shard's index, which need not exist."""
    return shard.with_suffix(".idx")


def check_name(shard: Path, name: str) -> None:
    """Raise UserError for a name by which a file would be written outside the folder that it is meant for."""
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise damaged(shard, f"has {name!r}, which is no name inside a folder")


def damaged(shard: Path, what: str) -> UserError:
    """Return the error for a damaged shard, with the remedy."""
    return UserError(f"{shard} {what}. Copy this shard again, or make it again.")


def _wrong_index(index: Path, what: str) -> UserError:
    return UserError(
        f"{index} {what}. Make this index again for the shard beside it, or remove it: without an index the "
        "shard is searched through."
    )
