"""Pack images and their masks into tar shards, unchanged and in the order of their names.

Invariant: every image is packed, a damaged one too. The order of training depends on the list of names, so
that a run on the shards sees what a run on the folder sees.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.split_folder import FOLDER_NAMES, Split
from horovod_volo.data.packing.packed_split import (
    PACKERS,
    WORK,
    Packer,
    Progress,
    Sample,
    SplitContent,
    check_packed,
    pack_split,
)
from horovod_volo.dense.scene_list import SceneList
from horovod_volo.dense.scene_shards import has_scenes, mask_member, open_scenes


def pack_scenes(
    data_dir: Path,
    out: Path,
    *,
    shard_images: int,
    shard_bytes: int,
    workers: int,
    progress: Callable[[Split], Progress],
) -> None:
    """Pack both splits of a folder of images and masks, or resume."""
    if out.resolve() == data_dir.resolve():
        raise UserError(f"{out} is the folder of the images. Name another folder for the shards.")
    check_packed(out)
    splits = {split: open_scenes(data_dir, split) for split in FOLDER_NAMES}
    work = out / WORK
    work.mkdir(parents=True, exist_ok=True)
    for split, scenes in splits.items():
        provenance = {
            "shard_images": shard_images,
            "shard_bytes": shard_bytes,
            "layout": scenes.layout.name,
            "zero_is_ignored": scenes.layout.zero_is_ignored,
            "scenes": scenes.digest,
        }
        content = SplitContent(
            classes=tuple(scenes.classes),
            order=np.arange(len(scenes), dtype=np.uint32),
            shard_images=shard_images,
            shard_bytes=shard_bytes,
            provenance=provenance,
            open=partial(partial, _read_scene, scenes),
        )
        pack_split(content, out, split, workers=workers, progress=progress(split))
        scenes.close()
    shutil.rmtree(work)


def _read_scene(scenes: SceneList, index: int) -> Sample:
    name = scenes.names[index]
    try:
        return (name, scenes.read(index).tobytes()), (mask_member(name), scenes.encoded_mask(index))
    except BadSampleError as error:  # not left out: that would change the order of training
        raise UserError(f"{error}. Repair it or remove the image, and pack again.") from error


PACKERS.register("images with masks", Packer(has_scenes, pack_scenes))
