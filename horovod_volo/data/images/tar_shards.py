"""Lists the images of tar shards in WebDataset layout: KEY.jpg (or another image) beside KEY.cls.

The key is the file name up to its first dot. A shard with an index beside it is not searched. The index is in
DALI's format: "v1.2 N", then one line per sample with ending, offset, size and name of each member.
The contents of members have no checksum; what is checked here is that every member is found.
"""

import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import LISTERS, Listed
from horovod_volo.data.images.catalog_file import CatalogWriter, Label, OpenFile, open_file
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

    label: Label
    name: str
    offset: int
    length: int


ShardReader = Callable[[Path], Iterator[ShardSample]]  # yields the images of a shard in order
ReadShard = Callable[[str], Iterator[ShardSample]]  # by the name of the shard


class Member(NamedTuple):
    """One file in a tar file; its content starts at `offset`, after its header."""

    name: str
    offset: int
    size: int


def list_shards(read_shard: ShardReader, images: SplitFolder, writer: CatalogWriter) -> Listed:
    """Add all samples; the positions of their labels are the numbers passed to the writer."""
    class_names = _read_class_names(images)
    read = partial(_named, images.root, class_names, read_shard)
    number_of: dict[Label, int] = {}
    hashes: list[NDArray[np.int64]] = []
    for number, shard in enumerate(images.parts):
        samples = read(shard)
        while chunk := list(islice(samples, _SAMPLES_AT_A_TIME)):
            labels, names, offsets, lengths = zip(*chunk, strict=True)
            numbers = [number_of.setdefault(label, len(number_of)) for label in labels]
            writer.add(numbers, names, shard=number, offsets=offsets, lengths=lengths)
            hashes.append(
                np.fromiter((hash(_catalog_name(sample)) for sample in chunk), np.int64, len(chunk))
            )
    if not hashes:
        raise UserError(f"no images in {images.root}: {shortened(images.parts)} hold none. Make them again.")
    _check_unique(images, read, np.concatenate(hashes))
    return (*_numbered(list(number_of), class_names, images.root), images.parts)


def _named(
    root: Path, class_names: tuple[str, ...], read_shard: ShardReader, shard: str
) -> Iterator[ShardSample]:
    """Yield the samples of a shard, with class names instead of numbers where classes.txt gives them."""
    for sample in read_shard(root / shard):
        label = sample.label
        if class_names:
            if not isinstance(label, int) or label >= len(class_names):
                raise UserError(
                    f"{sample.name} in {root / shard} is of class {label}, but {CLASSES_FILE} has "
                    f"{len(class_names)} lines, numbered from 0. Mend {CLASSES_FILE}."
                )
            label = class_names[label]
        name = sample.name.removeprefix(f"{label}/")
        check_name(root / shard, f"{label}/{name}".lstrip("/"))
        yield sample._replace(label=label, name=name)


def _catalog_name(sample: ShardSample) -> str:
    return sample.name if "/" in sample.name else f"{sample.label}/{sample.name}"


def _check_unique(images: SplitFolder, read: ReadShard, hashes: NDArray[np.int64]) -> None:
    unique, counts = np.unique(hashes, return_counts=True)
    repeated = set(unique[counts > 1].tolist())
    shard_of: dict[str, str] = {}
    for shard in images.parts if repeated else ():
        for name in map(_catalog_name, read(shard)):
            if name in shard_of:
                raise UserError(
                    f"{images.root} has two images named {name}, in {shard_of[name]} and in {shard}. "
                    "Label maps are found by name: make the shards again with unique names."
                )
            if hash(name) in repeated:
                shard_of[name] = shard


def _read_class_names(images: SplitFolder) -> tuple[str, ...]:
    """Return the classes in classes.txt beside tar shards; empty without such a file."""
    path = images.root / CLASSES_FILE
    if images.format != "tar" or not path.is_file():
        return ()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text in UTF-8. Save it as such, one class a line.") from None
    names = tuple(line.strip() for line in text.splitlines() if line.strip())
    if repeated := sorted(name for name, lines in Counter(names).items() if lines > 1):
        raise UserError(f"{path} names classes twice: {shortened(repeated)}. Give each class another name.")
    return names


def _numbered(
    labels: list[Label], class_names: tuple[str, ...], root: Path
) -> tuple[tuple[str, ...], list[int]]:
    """Return the class names, and the class number of each label."""
    names = [label for label in labels if isinstance(label, str)]
    numbers = [label for label in labels if isinstance(label, int)]
    if names and numbers:
        raise UserError(
            f"some images in {root} have a class by name ({names[0]}) and some only by number "
            f"({numbers[0]}). Make the shards with one of them."
        )
    if names:
        classes = class_names or tuple(sorted(names))
        number_of = {name: number for number, name in enumerate(classes)}
        return classes, [number_of[name] for name in names]
    digits = len(str(max(numbers)))  # zero-padded: the text order is the numeric order
    order = np.argsort(np.argsort(numbers))  # the position of each label in sorted order
    return tuple(f"{number:0{digits}d}" for number in sorted(numbers)), order.tolist()


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
            name = "/".join(image.name.removeprefix("./").split("/")[-2:])  # with its folder
            yield ShardSample(number, name, image.offset, image.size)
            image, number = None, None
    if image or number is not None:
        raise damaged(shard, f"has {key.lstrip('/')} without {'its .cls' if image else 'an image'}")


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


LISTERS.register("tar", partial(list_shards, tar_samples))
