"""Lists of images: the catalog of a split, with each image's class and the location of its bytes.

One rank lists the images and writes the catalog file, which all ranks read. Names and locations stay in the
file, so that a rank's memory does not grow with the number of images.

Invariant: a class's number is its position in `classes`. Weights, label maps and evaluation depend on it.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.atomic_file import atomic_write, make_folder
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.core.names import Registry
from horovod_volo.data.images import catalog_file
from horovod_volo.data.images.split_folder import (
    Format,
    HeldOut,
    Split,
    SplitFolder,
    check_links,
    find_split,
    is_image,
    shortened,
    visible,
)
from horovod_volo.data.reading import IMAGE_ENDINGS, START_BYTES, ending_of

SHARDS_OPEN = 64


class Catalog:
    """The images of one split, in a fixed order."""

    def __init__(self, file: catalog_file.OpenFile, path: Path | None) -> None:
        """Raise ValueError if the file is not a catalog, or damaged."""
        self._file = catalog_file.CatalogFile(file)
        metadata = self._file.metadata
        self.path = path  # None: in memory only
        self.classes = tuple(metadata["classes"])
        self.targets = self._file.targets  # (images,) positions in `classes`
        self.digest = self._file.digest  # of the images and their order: a resumed run must share it
        self.state = self._file.state  # of the split folder at the time of listing
        self.source = metadata["source"]
        self._shards = [Path(self.source) / shard for shard in metadata["shards"]]
        self.in_shards = bool(self._shards)  # else in class folders
        # A file is closed with its last reference, so none is closed while another thread reads it.
        self._open_shard = lru_cache(SHARDS_OPEN)(catalog_file.open_file)

    def __len__(self) -> int:
        return self._file.images

    def name(self, index: int) -> str:
        """Return "CLASS/FILE", which is unique."""
        name = self._file.name(self._file.entry(index))
        return name if "/" in name else f"{self.classes[self.targets[index]]}/{name}"

    def location(self, index: int) -> str:
        """Return the file of an image, or its shard and bytes, for messages."""
        entry = self._file.entry(index)
        if entry.form == catalog_file.AS_FILE:
            return str(Path(self.source) / self.name(index))
        last = entry.offset + entry.length - 1
        return f"{self._shard_name(entry.shard)}, bytes {entry.offset} to {last} ({self.name(index)})"

    def read(self, index: int) -> NDArray[np.uint8]:
        """Return the encoded image; raise BadSampleError if it cannot be read. Thread-safe."""
        try:
            encoded = self._encoded(index)
        except FileNotFoundError:
            raise BadSampleError(f"{self.location(index)} has gone since it was listed") from None
        except OSError as error:
            raise BadSampleError(f"{self.location(index)} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise BadSampleError(f"{self.location(index)} {error}") from error
        if not encoded:
            raise BadSampleError(f"{self.location(index)} is empty")
        return np.frombuffer(encoded, dtype=np.uint8)

    def read_ahead(self, indices: NDArray[np.int64]) -> None:
        """Begin to read images that are needed soon, if that saves time."""

    def number_as(self, classes: tuple[str, ...]) -> None:
        """Number the classes by their positions among `classes`, which has all of them."""
        number_of = {name: number for number, name in enumerate(classes)}
        numbers = np.array([number_of[name] for name in self.classes], np.int32)
        self.targets, self.classes = numbers[self.targets], classes

    def close(self) -> None:
        """Close the shards; the catalog's own file is closed with the last reference to the catalog."""
        self._open_shard.cache_clear()

    def _encoded(self, index: int) -> bytes:
        entry = self._file.entry(index)
        if entry.form == catalog_file.AS_FILE:
            # A string, because Path interns every name in the interpreter's table.
            with open(f"{self.source}/{self.name(index)}", "rb", buffering=0) as file:  # noqa: PTH123
                return file.read()
        encoded = self._range_of_shard(entry)
        if len(encoded) < entry.length:
            raise ValueError("cannot be read: the shard has been cut short")
        if encoded and not ending_of(encoded[:START_BYTES]):
            raise ValueError("does not begin as an image: the shard is damaged or has changed")
        return encoded

    # Lists of shards on a server replace these two.
    def _shard_name(self, shard: int) -> str:
        return str(self._shards[shard])

    def _range_of_shard(self, entry: catalog_file.CatalogEntry) -> bytes:
        return self._open_shard(self._shards[entry.shard]).read(entry.offset, entry.length)


def build_catalog(
    data_dir: str,
    split: Split,
    folder: Path | None,
    held_out: HeldOut | None = None,
    *,
    records: Format | None = None,
) -> Catalog:
    """List the images of one split of `data_dir`, or open the catalog in `folder` if it is up to date.

    Without a folder, the catalog is kept in memory. With `records`, the split holds shards of this format.
    """
    try:
        images = find_split(data_dir, split, held_out, records=records)
        path = folder and folder / f"{split}-{images.key}.catalog"
        existing = path and _open_if_valid(path)
        return existing if existing and existing.state == images.state else list_split(images, path)
    except OSError as error:
        where = "" if folder is None else f" and keep the list in {folder}"
        raise UserError(
            f"cannot list the images of {data_dir}{where}: {error}. Correct this, or choose "
            "another folder for the list with --catalog-dir."
        ) from error


def open_catalog(path: Path, digest: str) -> Catalog:
    """Open the catalog that another rank has written."""
    remedy = "--catalog-dir must name a folder that all hosts share."
    catalog = _open_if_valid(path)
    if catalog is None:
        raise UserError(
            f"this host does not see the list of images {path} that another rank has written, or sees it "
            f"damaged. {remedy}"
        )
    if catalog.digest != digest:
        raise UserError(f"this host sees other images in {path} than the rank that has written it. {remedy}")
    return catalog


def check_same_classes(train: Catalog, val: Catalog) -> None:
    """Raise UserError if the classes of the splits differ, and with them the meaning of class numbers."""
    unknown = sorted(set(val.classes) - set(train.classes))
    missing = sorted(set(train.classes) - set(val.classes))
    if unknown:
        raise UserError(
            f"{val.source} has classes that {train.source} lacks: {shortened(unknown)}. "
            "Remove these folders, or add training images of these classes."
        )
    if missing:
        raise UserError(
            f"{val.source} lacks classes that {train.source} has: {shortened(missing)}. Classes are numbered "
            "by their folders, so both need the same folders: add validation images of these classes."
        )
    if train.classes != val.classes:
        raise UserError(
            f"{val.source} numbers its classes in another order than {train.source}. Give both the same "
            "classes.txt."
        )


def list_split(images: SplitFolder, path: Path | None) -> Catalog:
    """List the images of a split into a file, or into memory without a path."""
    return Catalog(keep_list(lambda file: list_images(images, file.fileno()), path), path)


def keep_list(write: Callable[[BinaryIO], object], path: Path | None) -> catalog_file.OpenFile:
    """Open a list that `write` writes into a file, or into memory without a path."""
    if path is not None:
        make_folder(path.parent)
        with atomic_write(path) as file:
            write(file)
        return catalog_file.open_file(path)
    memory = catalog_file.OpenFile(os.memfd_create("catalog", os.MFD_CLOEXEC))
    with os.fdopen(memory.descriptor, "wb", closefd=False) as file:
        write(file)
    return memory


def _open_if_valid(path: Path) -> Catalog | None:
    try:
        return Catalog(catalog_file.open_file(path), path)
    except (OSError, ValueError):
        return None


# The class names, the class number of each label that the writer was given, and the names of the shards.
Listed = tuple[tuple[str, ...], Sequence[int], tuple[str, ...]]
LISTERS: Registry[Callable[[SplitFolder, catalog_file.CatalogWriter], Listed]] = Registry(
    "format of images", "DATA_DIR"
)


def list_images(images: SplitFolder, descriptor: int, sizes: Sequence[int] = ()) -> None:
    """Write the catalog of a split into an open, empty file; with `sizes` of its shards, to be published."""
    writer = catalog_file.CatalogWriter(descriptor)
    classes, numbers, shards = LISTERS.find(images.format)(images, writer)
    source, state = ("", "00" * catalog_file.STATE_BYTES) if sizes else (str(images.root), images.state)
    writer.finish(classes, numbers, shards, source, state, sizes)


def _list_folders(images: SplitFolder, writer: catalog_file.CatalogWriter) -> Listed:
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
    return images.parts, range(len(images.parts)), ()


LISTERS.register("folder", _list_folders)
