"""Pack the images of a catalog into tar shards: by several processes, resumable, with a sum for every shard.

A split lies in SPLIT.packing until it is whole, and is then renamed to SPLIT. A shard is finished when its
entry stands among the work; the entry is written after the shard, so that a killed pack goes on with the
shards that have none.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.atomic_file import atomic_write, remove_partials
from horovod_volo.core.errors import UserError
from horovod_volo.data.bad_samples import BadSampleError
from horovod_volo.data.images.catalog import Catalog, build_catalog, check_same_classes, open_catalog
from horovod_volo.data.images.split_folder import CLASSES_FILE, FOLDER_NAMES, Split, index_beside
from horovod_volo.data.packing.manifest import Manifest, PackedShard, read_manifest, shard_of, write_json
from horovod_volo.data.packing.packed_image import packed_image
from horovod_volo.data.packing.tar_writer import TarWriter, member_bytes
from horovod_volo.data.sampler import epoch_order

WORK = ".packing"  # folder beside the splits; gone when all is packed
_PROBED_IMAGES = 256  # tell how many images fill a shard
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)

Progress = Callable[[int, int], None]  # images done, of how many


@dataclass(frozen=True)
class Packing:
    """How images are packed; what shards hold is a function of this and of the images."""

    shard_images: int = 0  # 0: as many as fill shard_bytes
    shard_bytes: int = 256 * 10**6
    shorter_side: int = 0  # 0: images stay as they are
    quality: int = 95
    seed: int = 0
    shuffle: bool = True


@dataclass(frozen=True)
class _ShardTask:
    """One shard to make, as a worker is told."""

    catalog: Path
    digest: str
    indices: NDArray[np.uint32]  # (images,)
    packing: Packing
    shard: Path
    entry: Path


def pack(
    data_dir: Path, out: Path, packing: Packing, *, workers: int, pace: Callable[[Split], Progress]
) -> list[str]:
    """Pack both splits, or what is left of them; return which images were left out, and why."""
    for split in FOLDER_NAMES:
        if (out / split).exists():
            read_manifest(out / split)  # or else it is nothing of ours
    work = out / WORK
    catalogs = {split: build_catalog(str(data_dir), split, work) for split in FOLDER_NAMES}
    check_same_classes(catalogs["train"], catalogs["val"])
    left_out = []
    for split, catalog in catalogs.items():
        left_out += _pack_split(catalog, out, split, packing, workers=workers, progress=pace(split))
        catalog.close()
    shutil.rmtree(work)
    return left_out


def _pack_split(
    catalog: Catalog, out: Path, split: Split, packing: Packing, *, workers: int, progress: Progress
) -> list[str]:
    asked = {**asdict(packing), "catalog": catalog.digest, "images": len(catalog)}
    if (out / split).exists():
        manifest = read_manifest(out / split)
        if manifest.asked != asked:
            raise _other_pack(out / split)
        return manifest.left_out
    folder = out / f"{split}{WORK}"
    folder.mkdir(exist_ok=True)
    per_shard = _planned(out / WORK / f"{split}.plan.json", asked, catalog, packing)
    images = len(catalog)
    order = epoch_order(packing.seed, 0, images) if packing.shuffle else np.arange(images, dtype=np.uint32)
    jobs = [
        _ShardTask(
            catalog=_path_of(catalog),
            digest=catalog.digest,
            indices=order[start : start + per_shard],
            packing=packing,
            shard=folder / f"{split}-{number:06d}.tar",
            entry=out / WORK / f"{split}-{number:06d}.json",
        )
        for number, start in enumerate(range(0, images, per_shard))
    ]
    shards = _run(jobs, workers, lambda done: progress(done, images))
    _publish(folder, out / split, shards, catalog.classes, asked)
    return [image for shard in shards for image in shard.left_out]


def _other_pack(found: Path) -> UserError:
    return UserError(
        f"{found} is of other images, or of other settings. Give the same command as then, name "
        "another folder to pack into, or remove this one."
    )


def _path_of(catalog: Catalog) -> Path:
    if catalog.path is None:
        raise ValueError("workers need a catalog that is kept in a file")
    return catalog.path


def _run(jobs: list[_ShardTask], workers: int, tell: Callable[[int], None]) -> list[PackedShard]:
    """Make the shards that are not finished yet."""
    finished = {job.shard.name: shard for job in jobs if (shard := _finished(job)) is not None}
    left = [job for job in jobs if job.shard.name not in finished]
    done = sum(len(job.indices) for job in jobs) - sum(len(job.indices) for job in left)
    tell(done)
    # Spawned, not forked: a fork would copy whatever threads hold at that moment.
    pool = ProcessPoolExecutor(
        min(workers, len(left)) or 1, get_context("spawn"), _end_with_parent, (os.getpid(),)
    )
    with pool:
        try:
            images_of = {pool.submit(_pack_shard, job): len(job.indices) for job in left}
            for future in as_completed(images_of):
                shard = future.result()
                finished[shard.file] = shard
                done += images_of[future]
                tell(done)
        except BrokenProcessPool:
            raise UserError(
                "a packing process was killed, for want of memory perhaps. Give the same command again, with "
                "fewer --workers; finished shards are kept."
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return [finished[job.shard.name] for job in jobs]


def _end_with_parent(parent: int) -> None:
    """Let a worker end when whoever has begun it is killed, and not before."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the parent lets workers finish
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _pack_shard(job: _ShardTask) -> PackedShard:
    catalog = open_catalog(job.catalog, job.digest)
    left_out = []
    with atomic_write(job.shard) as file:
        writer = TarWriter(file)
        for index in job.indices.tolist():
            try:
                name, encoded = _packed(catalog, index, job.packing)
            except BadSampleError as error:
                left_out.append(str(error))
            else:
                writer.add(name, encoded, int(catalog.targets[index]))
        sha256 = writer.finish()
    lines = writer.index()
    if lines is not None:
        with atomic_write(index_beside(job.shard)) as file:
            file.write(lines)
    shard = PackedShard(
        file=job.shard.name,
        images=writer.images,
        bytes=writer.bytes,
        sha256=sha256,
        index_sha256="" if lines is None else hashlib.sha256(lines).hexdigest(),
        left_out=tuple(left_out),
    )
    write_json(job.entry, asdict(shard))
    return shard


def _packed(catalog: Catalog, index: int, packing: Packing) -> tuple[str, bytes]:
    encoded = catalog.read(index).tobytes()
    try:
        return packed_image(
            catalog.name(index), encoded, shorter_side=packing.shorter_side, quality=packing.quality
        )
    except BadSampleError as error:
        raise BadSampleError(f"{catalog.location(index)} {error}") from error


def _finished(job: _ShardTask) -> PackedShard | None:
    """Return a shard that an earlier run has finished."""
    if not job.entry.exists():
        return None
    shard = shard_of(json.loads(job.entry.read_text()))
    whole = job.shard.exists() and job.shard.stat().st_size == shard.bytes
    return shard if whole else None


def _planned(plan: Path, asked: dict[str, Any], catalog: Catalog, packing: Packing) -> int:
    """Return how many images make a shard: as an earlier run has planned, or else planned now."""
    if not plan.exists():
        write_json(plan, {"asked": asked, "images": packing.shard_images or _fitting(catalog, packing)})
    planned = json.loads(plan.read_text())
    if planned["asked"] != asked:
        raise _other_pack(plan)
    return int(planned["images"])


def _fitting(catalog: Catalog, packing: Packing) -> int:
    """Return how many images fill a shard, by the size of some."""
    sizes = []
    for index in np.linspace(0, len(catalog) - 1, min(_PROBED_IMAGES, len(catalog)), dtype=np.int64).tolist():
        try:
            sizes.append(member_bytes(len(_packed(catalog, index, packing)[1])))
        except BadSampleError:
            continue  # it is named when its shard is made
    return max(1, packing.shard_bytes * len(sizes) // max(1, sum(sizes)))


def _publish(
    folder: Path, place: Path, shards: list[PackedShard], classes: tuple[str, ...], asked: dict[str, Any]
) -> None:
    remove_partials(folder)
    names = "".join(f"{name}\n" for name in classes).encode()
    with atomic_write(folder / CLASSES_FILE) as file:
        file.write(names)
    manifest = Manifest(
        images=sum(shard.images for shard in shards),
        bytes=sum(shard.bytes for shard in shards),
        classes=len(classes),
        classes_sha256=hashlib.sha256(names).hexdigest(),
        asked=asked,
        shards=tuple(shards),
    )
    manifest.write(folder)
    folder.replace(place)
