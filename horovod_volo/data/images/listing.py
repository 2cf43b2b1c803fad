"""Lists the images of a split, in class folders or shards, into a catalog file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog_file import STATE_BYTES, CatalogWriter, Label
from horovod_volo.data.images.split_folder import (
    CLASSES_FILE,
    PUBLISHED_CATALOG,
    Split,
    SplitFolder,
    check_links,
    find_split,
    is_image,
    shortened,
    visible,
)
from horovod_volo.data.images.tar_shards import ShardReader, ShardSample, check_name, tar_samples
from horovod_volo.data.reading import IMAGE_ENDINGS

SAMPLES_AT_A_TIME = 8192
ReadShard = Callable[[str], Iterator[ShardSample]]  # by the name of the shard


def publish_catalog(data_dir: str, split: Split) -> int:
    """Write the list of a split's images beside its shards, for a server; return the number of shards.

    It is the same for the same shards, wherever they are.
    """
    images = find_split(data_dir, split)
    if images.format == "folder":
        raise UserError(
            f"{images.root} holds no shards, and only shards are read from a server. Pack it first."
        )
    sizes = [(images.root / shard).stat().st_size for shard in images.parts]
    with atomic_write(images.root / PUBLISHED_CATALOG) as file:
        list_images(images, file.fileno(), sizes=sizes)
    return len(sizes)


def list_images(
    images: SplitFolder, descriptor: int, read_shard: ShardReader = tar_samples, sizes: Sequence[int] = ()
) -> None:
    """Write the catalog of a split into an open, empty file; with `sizes` of its shards, to be published."""
    writer = CatalogWriter(descriptor)
    if images.format == "folder":
        _list_folders(images, writer)
        classes, numbers, shards = images.parts, list(range(len(images.parts))), tuple[str, ...]()
    else:
        class_names = _read_class_names(images)
        read = partial(_named, images.root, class_names, read_shard)
        labels = _list_shards(images, read, writer)
        classes, numbers = _numbered(labels, class_names, images.root)
        shards = images.parts
    source, state = ("", "00" * STATE_BYTES) if sizes else (str(images.root), images.state)
    writer.finish(classes, numbers, shards, source, state, sizes)


def _list_shards(images: SplitFolder, read: ReadShard, writer: CatalogWriter) -> list[Label]:
    """Add all samples; return the labels, whose positions are the numbers passed to the writer."""
    number_of: dict[Label, int] = {}
    hashes: list[NDArray[np.int64]] = []
    for number, shard in enumerate(images.parts):
        samples = read(shard)
        while chunk := list(islice(samples, SAMPLES_AT_A_TIME)):
            labels, names, offsets, lengths = zip(*chunk, strict=True)
            numbers = [number_of.setdefault(label, len(number_of)) for label in labels]
            writer.add(numbers, names, shard=number, offsets=offsets, lengths=lengths)
            hashes.append(np.fromiter((hash(_name(sample)) for sample in chunk), np.int64, len(chunk)))
    if not hashes:
        raise UserError(f"no images in {images.root}: {shortened(images.parts)} hold none. Make them again.")
    _check_unique(images, read, np.concatenate(hashes))
    return list(number_of)


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


def _name(sample: ShardSample) -> str:
    """Return the sample's name in the catalog."""
    return sample.name if "/" in sample.name else f"{sample.label}/{sample.name}"


def _check_unique(images: SplitFolder, read: ReadShard, hashes: NDArray[np.int64]) -> None:
    unique, counts = np.unique(hashes, return_counts=True)
    repeated = set(unique[counts > 1].tolist())
    shard_of: dict[str, str] = {}
    for shard in images.parts if repeated else ():
        for name in map(_name, read(shard)):
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


def _list_folders(images: SplitFolder, writer: CatalogWriter) -> None:
    """Add the images of all classes in order, each class sorted by name; of a part, those that it has."""
    empty, lost, count = [], list[str](), 0
    for number, name in enumerate(images.parts):
        _, found, links = visible(images.root / name)
        files = sorted(filter(is_image, found))
        lost += [f"{name}/{file}" for file in filter(is_image, links)]
        count += len(files)
        if files:
            writer.add(number, images.part.of(name, files) if images.part else files)
        else:
            empty.append(str(images.root / name))
    check_links(images.root, lost, count)
    if empty:
        inside = sorted(each.name for each in Path(empty[0]).iterdir() if each.is_dir())
        seen = f" The first has folders ({shortened(inside)}): classes are one level deep." if inside else ""
        raise UserError(
            f"no images in {shortened(empty)}.{seen} Add images "
            f"({', '.join(IMAGE_ENDINGS)}) directly inside, or remove the folder."
        )
