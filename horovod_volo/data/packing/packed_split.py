"""Pack the samples of a split into tar shards with several processes; a killed run can be resumed.

The bytes of a shard depend only on the samples, not on times, owners or paths, so that equal shards have
equal checksums. A split is written into SPLIT.packing and renamed to SPLIT when it is complete.

Invariant: the record of a shard is written into the work folder after the shard itself, so shards with a
record are finished.
"""

import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.atomic_file import atomic_write, flush, remove_partials
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.core.names import Registry
from horovod_volo.data.images.split_folder import CLASSES_FILE, FOLDER_NAMES, Split
from horovod_volo.data.images.tar_shards import BLOCK_BYTES, INDEX_VERSION, index_beside
from horovod_volo.data.packing.manifest import Manifest, PackedShard, parse_shard, read_manifest, write_json
from horovod_volo.data.process_pool import run_in_processes

WORK = ".packing"  # work folder beside the splits, removed at the end
_TAR_BYTES = 20 * BLOCK_BYTES  # the size of a tar file is a multiple of it
_ORDER = 2  # version of the shuffled order; shards of different orders must not be mixed
_PROBED_SAMPLES = 256  # their mean size determines how many samples fill a shard

Progress = Callable[[int, int], None]  # images done, images in all
Sample = tuple[tuple[str, bytes], ...]  # names and contents of members; the image is the first
ReadSample = Callable[[int], Sample]  # raises BadSampleError for an image that is to be left out


class Packer(NamedTuple):
    """What packs data that an extra reads."""

    fits: Callable[[Path], bool]  # whether a data folder holds such data
    pack: Callable[..., None]


PACKERS: Registry[Packer] = Registry("kind of data to pack", "to pack")


@dataclass(frozen=True)
class SplitContent:
    """The samples of a split, and how they are distributed over shards."""

    classes: tuple[str, ...]
    order: NDArray[np.uint32]  # (images,)
    shard_images: int  # 0: as many as fill `shard_bytes`
    shard_bytes: int
    provenance: dict[str, Any]  # identifies the samples and the options
    open: Callable[[], ReadSample]  # called in each worker process


@dataclass(frozen=True)
class _ShardTask:
    """One shard for a worker process to write."""

    open: Callable[[], ReadSample]
    indices: NDArray[np.uint32]  # (images,)
    shard: Path
    record: Path


class TarWriter:
    """Appends samples to an open tar file in WebDataset layout."""

    def __init__(self, file: BinaryIO) -> None:
        self.bytes = 0
        self.images = 0
        self._file = file
        self._digest = hashlib.sha256()
        self._lines: list[str] = []
        self._indexable = True

    def add(self, *members: tuple[str, bytes]) -> None:
        """Add the names and contents of an image and of what belongs to it."""
        words = []
        for name, data in members:
            # The fields of an index are separated by spaces, so it cannot contain names with spaces.
            self._indexable &= name.split() == [name]
            ending = name.rpartition("/")[2].partition(".")[2]
            words.append(f"{ending} {self._append(name, data)} {len(data)} {name}")
        self._lines.append(" ".join(words))
        self.images += 1

    def finish(self) -> str:
        """Write the end of the tar file; return its SHA-256 in hexadecimal."""
        end = self.bytes + 2 * BLOCK_BYTES
        self._write(bytes(end - self.bytes + -end % _TAR_BYTES))
        return self._digest.hexdigest()

    def index(self) -> bytes | None:
        """Return the content of the index; None if a name contains spaces."""
        lines = [f"{INDEX_VERSION} {self.images}", *self._lines]
        return os.fsencode("\n".join(lines) + "\n") if self._indexable else None

    def _append(self, name: str, data: bytes) -> int:
        """Append a member; return the offset of its content."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        self._write(member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
        start = self.bytes
        self._write(data + bytes(-len(data) % BLOCK_BYTES))
        return start

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.bytes += len(data)


def check_packed(out: Path) -> None:
    """Raise UserError if a folder of a split exists and is not a packed split."""
    for split in FOLDER_NAMES:
        if (out / split).exists():
            read_manifest(out / split)


def pack_split(
    content: SplitContent, out: Path, split: Split, *, workers: int, progress: Progress
) -> list[str]:
    """Pack one split, or resume; return one message for each image that was left out."""
    images = len(content.order)
    if (out / split).exists():
        manifest = read_manifest(out / split)
        _check_asked(manifest.asked, content, out / split)
        return manifest.left_out
    folder, plan = out / f"{split}{WORK}", out / WORK / f"{split}.plan.json"
    if not plan.exists():  # shards without their plan may hold other images
        for record in plan.parent.glob(f"{split}-*.json"):
            record.unlink()
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(exist_ok=True)
    per_shard = _images_per_shard(plan, content)
    tasks = [
        _ShardTask(
            open=content.open,
            indices=content.order[start : start + per_shard],
            shard=folder / f"{split}-{number:06d}.tar",
            record=out / WORK / f"{split}-{number:06d}.json",
        )
        for number, start in enumerate(range(0, images, per_shard))
    ]
    shards = _pack_shards(tasks, workers, lambda done: progress(done, images))
    _publish(folder, out / split, shards, content)
    return [image for shard in shards for image in shard.left_out]


def _check_asked(asked: dict[str, Any], content: SplitContent, packed: Path) -> None:
    """Raise UserError if an earlier pack was of something else. Not all packs have noted their source."""
    if {"source": content.provenance.get("source"), **asked} != {"source": None, **content.provenance}:
        raise UserError(
            f"{packed} was packed from other images or with other options. Give those it was packed "
            "with, name another output folder, or remove this one."
        )


def _pack_shards(
    tasks: list[_ShardTask], workers: int, report_done: Callable[[int], None]
) -> list[PackedShard]:
    """Write the shards that are not finished yet; return all shards in order."""
    finished = {task.shard.name: shard for task in tasks if (shard := _read_finished(task)) is not None}
    remaining = [task for task in tasks if task.shard.name not in finished]

    def report() -> None:
        report_done(sum(len(task.indices) for task in tasks if task.shard.name in finished))

    def note(name: str, shard: PackedShard) -> None:
        finished[name] = shard
        report()

    report()
    try:
        run_in_processes(_pack_shard, {task.shard.name: (task,) for task in remaining}, workers, note)
    finally:
        for folder in {path.parent for task in remaining for path in (task.shard, task.record)}:
            remove_partials(folder)  # of workers that were killed
    return [finished[task.shard.name] for task in tasks]


def _pack_shard(task: _ShardTask) -> PackedShard:
    read = task.open()
    left_out = []
    with atomic_write(task.shard) as file:
        writer = TarWriter(file)
        for index in task.indices.tolist():
            try:
                sample = read(index)
            except BadSampleError as error:
                left_out.append(str(error))
            else:
                writer.add(*sample)
        sha256 = writer.finish()
    index_beside(task.shard).unlink(missing_ok=True)  # of a shard that left images out
    lines = writer.index()
    if lines is not None:
        with atomic_write(index_beside(task.shard)) as file:
            file.write(lines)
    shard = PackedShard(
        file=task.shard.name,
        images=writer.images,
        bytes=writer.bytes,
        sha256=sha256,
        index_sha256="" if lines is None else hashlib.sha256(lines).hexdigest(),
        left_out=tuple(left_out),
    )
    write_json(task.record, asdict(shard))
    return shard


def _read_finished(task: _ShardTask) -> PackedShard | None:
    """Return the record of a shard that an earlier run finished, else None."""
    if not task.record.exists():
        return None
    shard = parse_shard(json.loads(task.record.read_text()))
    complete = task.shard.exists() and task.shard.stat().st_size == shard.bytes
    return shard if complete and not shard.left_out else None  # those may be readable by now


def _images_per_shard(plan: Path, content: SplitContent) -> int:
    """Return the number of images per shard: that of the earlier run that is resumed, or a new estimate."""
    if not plan.exists():
        per_shard = content.shard_images or _estimate(content)
        write_json(plan, {"asked": content.provenance, "images": per_shard, "order": _ORDER})
    planned = json.loads(plan.read_text())
    # An earlier version shuffled in another order.
    in_order = planned.get("order") == _ORDER or not content.provenance.get("shuffle")
    _check_asked(planned["asked"] if in_order else {}, content, plan.parents[1])
    return int(planned["images"])


def _estimate(content: SplitContent) -> int:
    """Estimate how many images fill a shard from the sizes of some of them."""
    read, images, sizes = content.open(), len(content.order), []
    for index in np.linspace(0, images - 1, min(_PROBED_SAMPLES, images), dtype=np.int64).tolist():
        try:
            sizes.append(sum(2 * BLOCK_BYTES + len(data) for _, data in read(index)))
        except BadSampleError:
            continue  # reported when its shard is written
    return max(1, content.shard_bytes * len(sizes) // max(1, sum(sizes)))


def _publish(folder: Path, destination: Path, shards: list[PackedShard], content: SplitContent) -> None:
    remove_partials(folder)
    names = "".join(f"{name}\n" for name in content.classes).encode()
    with atomic_write(folder / CLASSES_FILE) as file:
        file.write(names)
    manifest = Manifest(
        images=sum(shard.images for shard in shards),
        bytes=sum(shard.bytes for shard in shards),
        classes=len(content.classes),
        classes_sha256=hashlib.sha256(names).hexdigest(),
        asked=content.provenance,
        shards=tuple(shards),
    )
    manifest.write(folder)
    folder.replace(destination)
    flush(destination.parent)
