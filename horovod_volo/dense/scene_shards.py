"""Images and masks in tar shards, where each image NAME.jpg is followed by its mask NAME.mask.png.

Invariant: a split has the same names in the same order, and so the same digest, as the folder that it was
packed from, and a damaged image is packed too. A run may therefore continue on either.
"""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_volo.core.atomic_file import make_folder
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import SHARDS_OPEN
from horovod_volo.data.images.catalog_file import open_file
from horovod_volo.data.images.split_folder import FOLDER_NAMES, Split
from horovod_volo.data.images.tar_shards import MASK_ENDING, damaged, tar_members
from horovod_volo.data.packing import packed_split
from horovod_volo.data.packing.manifest import MANIFEST, PackedShard, read_manifest
from horovod_volo.dense import scene_list

_LAYOUT = "layout"  # an entry of manifests of images with masks


@dataclass(frozen=True, eq=False)
class SceneShards(scene_list.SceneList):
    shards: tuple[Path, ...]
    places: NDArray[np.int64]  # (images, 5): shard; offset and bytes of the image; those of the mask
    _open: Any = field(default_factory=lambda: lru_cache(SHARDS_OPEN)(open_file), init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to make this list again in another process, which opens the shards itself."""
        return SceneShards, (self.root, self.layout, self.split, self.names, self.shards, self.places)

    def location(self, index: int) -> str:
        return self._location(index, 1, self.names[index])

    def mask_location(self, index: int) -> str:
        return self._location(index, 3, mask_member(self.names[index]))

    def read(self, index: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._content(index, 1, self.location(index)), dtype=np.uint8)

    def encoded_mask(self, index: int) -> bytes:
        return self._content(index, 3, self.mask_location(index))

    def close(self) -> None:
        self._open.cache_clear()

    def _location(self, index: int, column: int, name: str) -> str:
        offset, length = self.places[index, column : column + 2].tolist()
        return f"{self.shards[self.places[index, 0]]}, bytes {offset} to {offset + length - 1} ({name})"

    def _content(self, index: int, column: int, where: str) -> bytes:
        offset, length = self.places[index, column : column + 2].tolist()
        try:
            content: bytes = self._open(self.shards[self.places[index, 0]]).read(offset, length)
        except OSError as error:
            raise BadSampleError(f"{where} cannot be read: {error.strerror}") from error
        if len(content) < length:
            raise BadSampleError(f"{where} cannot be read: the shard has been cut short")
        return content


def has_scenes(root: Path) -> bool:
    """Return whether a data folder, packed or not, holds images with masks rather than with classes."""
    packed = [root / split for split in FOLDER_NAMES if (root / split / MANIFEST).is_file()]
    if packed:
        return _LAYOUT in read_manifest(packed[0]).asked
    has_classes = any((root / name).is_dir() for names in FOLDER_NAMES.values() for name in names)
    return not has_classes and any((root / name).is_dir() for name in scene_list.MASK_FOLDERS)


def open_scenes(root: Path, split: Split) -> scene_list.SceneList:
    """List a split of a data folder, packed or not; raise UserError if it has no images with masks."""
    if not root.is_dir():
        raise UserError(f"There is no folder {root}. Give the folder of the images and masks.")
    if any((root / name / MANIFEST).is_file() for name in FOLDER_NAMES):
        return _list_shards(root, split)
    return scene_list.list_scenes(root, scene_list.find_layout(root), split)


def mask_member(image: str) -> str:
    """Return the name that the mask of an image has in a shard."""
    return f"{image.removesuffix(PurePosixPath(image).suffix)}{MASK_ENDING}"


def _list_shards(root: Path, split: Split) -> SceneShards:
    folder = root / split
    manifest = read_manifest(folder)
    if _LAYOUT not in manifest.asked:
        raise UserError(
            f"{folder} holds packed images without masks. Give a folder that was packed from images and "
            "masks, or train with --task classification."
        )
    found = [
        (number, *pair) for number, shard in enumerate(manifest.shards) for pair in _pairs(folder, shard)
    ]
    names, places = tuple(name for _, name, _ in found), [(number, *place) for number, _, place in found]
    layout = scene_list.SceneLayout(
        manifest.asked[_LAYOUT], scene_list.read_classes(folder), manifest.asked["zero_is_ignored"]
    )
    shards = tuple(folder / shard.file for shard in manifest.shards)
    scenes = SceneShards(root, layout, split, names, shards, np.array(places, dtype=np.int64))
    if scenes.digest != manifest.asked["scenes"]:
        raise UserError(
            f"{folder} does not hold the images or the classes that {MANIFEST} there was written for. Copy "
            "its files again, or pack again."
        )
    return scenes


def _pairs(folder: Path, shard: PackedShard) -> Iterator[tuple[str, tuple[int, int, int, int]]]:
    """Yield the name of each image, and offset and bytes of the image and of its mask."""
    path = folder / shard.file
    try:
        file = open_file(path)
        if file.size != shard.bytes:
            raise damaged(path, f"has {file.size:,} bytes instead of {shard.bytes:,}")
        members = tar_members(path, file)
        for image in members:
            mask = next(members, None)
            if mask is None or mask.name != mask_member(image.name):
                raise damaged(path, f"has {image.name} without its mask")
            yield image.name, (image.offset, image.size, mask.offset, mask.size)
    except OSError as error:
        raise damaged(path, f"cannot be read: {error.strerror}") from error


def pack_scenes(
    data_dir: Path,
    out: Path,
    *,
    shard_images: int,
    shard_bytes: int,
    workers: int,
    progress: Callable[[Split], packed_split.Progress],
) -> None:
    """Pack both splits of a folder of images and masks, or resume."""
    if out.resolve() == data_dir.resolve():
        raise UserError(f"{out} is the folder of the images. Name another folder for the shards.")
    packed_split.check_packed(out)
    splits = {split: open_scenes(data_dir, split) for split in FOLDER_NAMES}
    work = out / packed_split.WORK
    make_folder(work)
    for split, scenes in splits.items():
        content = packed_split.SplitContent(
            classes=tuple(scenes.classes),
            order=np.arange(len(scenes), dtype=np.uint32),
            shard_images=shard_images,
            shard_bytes=shard_bytes,
            provenance={
                "shard_images": shard_images,
                "shard_bytes": shard_bytes,
                _LAYOUT: scenes.layout.name,
                "zero_is_ignored": scenes.layout.zero_is_ignored,
                "scenes": scenes.digest,
            },
            open=partial(partial, _read_scene, scenes),
        )
        packed_split.pack_split(content, out, split, workers=workers, progress=progress(split))
        scenes.close()
    shutil.rmtree(work)


def _read_scene(scenes: scene_list.SceneList, index: int) -> packed_split.Sample:
    name = scenes.names[index]
    try:
        return (name, scenes.read(index).tobytes()), (mask_member(name), scenes.encoded_mask(index))
    except BadSampleError as error:  # not left out: that would change the order of training
        raise UserError(f"{error}. Repair it or remove the image, and pack again.") from error


packed_split.PACKERS.register("images with masks", packed_split.Packer(has_scenes, pack_scenes))
