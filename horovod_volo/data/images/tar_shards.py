"""Lists the images of tar shards in WebDataset layout: KEY.jpg (or another image) beside KEY.cls.

The key is the file name up to its first dot. A shard with an index beside it is not searched. The index is in
DALI's format: "v1.2 N", then one line per sample with ending, offset, size and name of each member.
The contents of members have no checksum; what is checked here is that every member is found.
"""

from __future__ import annotations

import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import LISTERS, Listed
from horovod_volo.data.images.catalog_file import CatalogWriter, OpenFile, open_file
from horovod_volo.data.images.split_folder import CLASSES_FILE, SplitFolder, shortened
from horovod_volo.data.reading import IMAGE_ENDINGS

INDEX_VERSION = "v1.2"
MASK_ENDING = ".mask.png"  # of what follows an image for segmentation
BLOCK_BYTES = 512  # the unit of a tar file
_NAME, _SIZE, _MAGIC = slice(100), slice(124, 136), slice(257, 262)  # of a member's header
_END_BYTES = 2 * BLOCK_BYTES  # zeros that end a tar file
_LONGEST_END_BYTES = 2**20  # GNU tar pads to at most that; longer ones are damage
_LARGEST_CLASS = 2**31 - 1
_SAMPLES_AT_A_TIME = 8192


class ShardSample(NamedTuple):
    """One image of a shard."""

    label: int
    class_name: str  # by classes.txt; without that, the label
    name: str  # FILE, or FOLDER/FILE where the folder is not the class's
    offset: int
    length: int

    @property
    def full_name(self) -> str:
        """Return the name in the catalog."""
        return self.name if "/" in self.name else f"{self.class_name}/{self.name}"


class Member(NamedTuple):
    """One file in a tar file; its content starts at `offset`, after its header."""

    name: str
    offset: int
    size: int


def list_shards(images: SplitFolder, writer: CatalogWriter) -> Listed:
    """Add all samples; the positions of their labels are the numbers passed to the writer."""
    class_names = _read_class_names(images.root)
    number_of: dict[int, int] = {}
    hashes: list[NDArray[np.int64]] = []
    for number, shard in enumerate(images.parts):
        samples = _tar_samples(images.root / shard, class_names)
        while chunk := list(islice(samples, _SAMPLES_AT_A_TIME)):
            labels, _, names, offsets, lengths = zip(*chunk, strict=True)
            numbers = [number_of.setdefault(label, len(number_of)) for label in labels]
            writer.add(numbers, names, shard=number, offsets=offsets, lengths=lengths)
            hashes.append(np.fromiter((hash(sample.full_name) for sample in chunk), np.int64, len(chunk)))
    if not hashes:
        raise UserError(f"no images in {images.root}: {shortened(images.parts)} hold none. Make them again.")
    _check_unique(images, class_names, np.concatenate(hashes))
    if class_names:
        return class_names, list(number_of), images.parts
    digits = len(str(max(number_of)))  # zero-padded: the text order is the numeric order
    order = np.argsort(np.argsort(list(number_of)))  # the position of each label in sorted order
    return tuple(f"{label:0{digits}d}" for label in sorted(number_of)), order.tolist(), images.parts


def _check_unique(images: SplitFolder, class_names: tuple[str, ...], hashes: NDArray[np.int64]) -> None:
    unique, counts = np.unique(hashes, return_counts=True)
    repeated = set(unique[counts > 1].tolist())
    shard_of: dict[str, str] = {}
    for shard in images.parts if repeated else ():
        for sample in _tar_samples(images.root / shard, class_names):
            name = sample.full_name
            if name in shard_of:
                raise UserError(
                    f"{images.root} has two images named {name}, in {shard_of[name]} and in {shard}. "
                    "Label maps are found by name: make the shards again with unique names."
                )
            if hash(name) in repeated:
                shard_of[name] = shard


def _read_class_names(root: Path) -> tuple[str, ...]:
    """Return the classes in classes.txt beside tar shards; empty without such a file."""
    path = root / CLASSES_FILE
    if not path.is_file():
        return ()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8. Save it as such, one class a line.") from None
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if repeated := sorted(name for name, lines in Counter(names).items() if lines > 1):
        raise UserError(f"{path} names classes twice: {shortened(repeated)}. Give each class another name.")
    return names


def tar_members(shard: Path, file: OpenFile) -> Iterator[Member]:
    """Yield the files of an open shard in order, from its index if it has one."""
    index = index_beside(shard)
    for member in _indexed(file, index) if index.is_file() else _searched(file, shard):
        check_name(shard, member.name)
        yield member


def _tar_samples(shard: Path, class_names: tuple[str, ...]) -> Iterator[ShardSample]:
    """Yield the images of a shard in order, with their classes in classes.txt if there is one."""
    for label, image in _labelled_images(shard):
        name = "/".join(image.name.removeprefix("./").split("/")[-2:])  # with its parent folder
        if class_names and label >= len(class_names):
            raise UserError(
                f"{name} in {shard} is of class {label}, but {CLASSES_FILE} has {len(class_names)} lines, "
                f"numbered from 0. Mend {CLASSES_FILE}."
            )
        class_name = class_names[label] if class_names else str(label)
        name = name.removeprefix(f"{class_name}/")
        check_name(shard, f"{class_name}/{name}".lstrip("/"))
        yield ShardSample(label, class_name, name, image.offset, image.size)


def _labelled_images(shard: Path) -> Iterator[tuple[int, Member]]:
    """Yield the class number and the member of each image of a shard."""
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
            raise _unpaired(shard, key, image)
        key = here
        if is_image:
            image = member
        else:
            number = _class_number(file, shard, member)
        if image and number is not None:
            yield number, image
            image, number = None, None
    if image or number is not None:
        raise _unpaired(shard, key, image)


def _unpaired(shard: Path, key: str, image: Member | None) -> UserError:
    return damaged(shard, f"has {key.lstrip('/')} without {'its .cls' if image else 'an image'}")


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


LISTERS.register("tar", list_shards)
