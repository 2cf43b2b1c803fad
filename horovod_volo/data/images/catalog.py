"""The catalog of a split: each image's class and the location of its bytes.

One rank lists the images and writes the catalog file, which all ranks read. Names and locations stay in the
file, so that a rank's memory does not grow with the number of images.

Invariant: a class's number is its position in `classes`. Weights, label maps and evaluation depend on it.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog_file import (
    CatalogEntry,
    Form,
    map_targets,
    read_header,
    read_metadata,
    read_record,
)
from horovod_volo.data.images.image_bytes import START_BYTES, ending_of
from horovod_volo.data.images.listing import list_images
from horovod_volo.data.images.open_files import OpenFile, OpenFiles
from horovod_volo.data.images.recordio import image_of_parts
from horovod_volo.data.images.split_folder import HeldOut, Split, SplitFolder, find_split, shortened

SHARDS_OPEN = 64


class Catalog:
    """The images of one split, in a fixed order."""

    def __init__(self, file: OpenFile, path: Path | None) -> None:
        header = read_header(file.descriptor)
        if header is None:
            raise ValueError("not a catalog")
        metadata = read_metadata(file.descriptor, header)
        self.path = path  # None: in memory only
        self.classes: tuple[str, ...] = tuple(metadata["classes"])
        self.targets = map_targets(file.descriptor, header)  # (images,) int32
        self.digest = header.digest  # identifies the images and their order
        self.state = header.state  # of the split folder at the time of listing
        self.source: str = metadata["source"]
        self._file = file
        self._header = header
        self._shards = [Path(self.source) / shard for shard in metadata["shards"]]
        self.in_shards = bool(self._shards)  # else in class folders
        self._open_shards = OpenFiles(SHARDS_OPEN)

    def __len__(self) -> int:
        return self._header.images

    def name(self, index: int) -> str:
        """Return "CLASS/FILE", which is unique."""
        record = read_record(self._file.descriptor, self._header, index)
        name = os.fsdecode(self._file.read(record.name_start, record.name_length))
        return name if "/" in name else f"{self.classes[self.targets[index]]}/{name}"

    def location(self, index: int) -> str:
        """Return the file of an image, or its shard and bytes, for messages."""
        record = read_record(self._file.descriptor, self._header, index)
        if record.form == Form.FILE:
            return str(Path(self.source) / self.name(index))
        last = record.offset + record.length - 1
        return f"{self._shard_name(record.shard)}, bytes {record.offset} to {last} ({self.name(index)})"

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
        """Do nothing: the operating system reads files and shards ahead."""

    def number_as(self, classes: tuple[str, ...]) -> None:
        """Number the classes by their positions among `classes`, which has all of them."""
        number_of = {name: number for number, name in enumerate(classes)}
        numbers = np.array([number_of[name] for name in self.classes], np.int32)
        self.targets, self.classes = numbers[self.targets], classes

    def close(self) -> None:
        """Close the shards; the catalog's own file is closed with the last reference to the catalog."""
        self._open_shards.clear()

    def _encoded(self, index: int) -> bytes:
        record = read_record(self._file.descriptor, self._header, index)
        if record.form == Form.FILE:
            # A string, because Path interns every name in the interpreter's table.
            with open(f"{self.source}/{self.name(index)}", "rb", buffering=0) as file:  # noqa: PTH123
                return file.read()
        encoded = self._range_of_shard(record)
        if len(encoded) < record.length:
            raise ValueError("cannot be read: the shard has been cut short")
        if record.form == Form.PARTS:
            encoded = image_of_parts(encoded)
        if encoded and not ending_of(encoded[:START_BYTES]):
            raise ValueError("does not begin as an image: the shard is damaged or has changed")
        return encoded

    # Lists of shards on a server replace these two.
    def _shard_name(self, shard: int) -> str:
        return str(self._shards[shard])

    def _range_of_shard(self, record: CatalogEntry) -> bytes:
        return self._open_shards.get(self._shards[record.shard]).read(record.offset, record.length)


def build_catalog(
    data_dir: str, split: Split, folder: Path | None, held_out: HeldOut | None = None
) -> Catalog:
    """List the images of one split of `data_dir`, or open the catalog in `folder` if it is up to date.

    Without a folder, the catalog is kept in memory.
    """
    try:
        images = find_split(data_dir, split, held_out)
        return in_memory(images) if folder is None else _in_folder(images, folder, split)
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


def in_memory(images: SplitFolder) -> Catalog:
    """List the images of a split without a file on a disk."""
    memory = OpenFile(os.memfd_create("catalog", os.MFD_CLOEXEC))
    list_images(images, memory.descriptor)
    return Catalog(memory, path=None)


def _in_folder(images: SplitFolder, folder: Path, split: Split) -> Catalog:
    path = folder / f"{split}-{images.key}.catalog"
    existing = _open_if_valid(path)
    if existing is not None and existing.state == images.state:
        return existing
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        list_images(images, file.fileno())
    return Catalog(open_list(path), path)


def _open_if_valid(path: Path) -> Catalog | None:
    try:
        return Catalog(open_list(path), path)
    except (OSError, ValueError):
        return None


def open_list(path: Path) -> OpenFile:
    """Open the file of a catalog."""
    return OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
