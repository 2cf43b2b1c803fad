"""A file that was damaged on disk is refused with one message, or read as it was before.

Contents that no checksum covers (texts written by hand, members of a tar shard without its manifest) may
read differently; reading them raises no other error. MUTATIONS=1000 in the environment draws more mutations.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from horovod_volo.config.recipe import RECIPES, load_recipe
from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import Catalog, build_catalog
from horovod_volo.data.packing.manifest import check_split
from horovod_volo.data.packing.pack import PackOptions, pack
from horovod_volo.data.reading import decode_rgb
from horovod_volo.demo.scene_set import make_scene_set
from horovod_volo.dense.scene_shards import open_scenes, pack_scenes
from horovod_volo.engine.checkpoint.files import (
    find_checkpoint,
    read_metadata,
    read_tensors,
    write_checkpoint,
)
from horovod_volo.labelling.store_writer import open_writer
from horovod_volo.labelling.verify import check_store
from horovod_volo.models.weights import read_weights
from horovod_volo.token_labels.keys import catalog_keys
from horovod_volo.token_labels.store import LabelStore
from tests.unit.shard_writers import example, picture, recordio_content, write_recordio, write_tfrecord

MUTATIONS = int(os.environ.get("MUTATIONS", "40"))  # of each kind of file
KINDS = ("JPEG", "PNG", "TIFF", "WEBP", "BMP", "GIF")
Load = Callable[[], Any]
Case = tuple[list[Path], Load]  # the files that are damaged, and what reads them


def mutated(content: bytes, random: np.random.Generator) -> bytes:
    """Flip a bit, cut, append, zero a block, or exchange two blocks."""
    size = int(random.choice([1, 16, 512]))
    first, second = sorted((random.integers(len(content), size=2) // size * size).tolist())
    at, other = slice(first, first + size), slice(second, second + size)
    changed = bytearray(content)
    match random.integers(5):
        case 0:
            changed[random.integers(len(content))] ^= 1 << int(random.integers(8))
        case 1:
            del changed[first:]
        case 2:
            changed += random.bytes(size)
        case 3:
            changed[at] = bytes(len(content[at]))
        case _:
            changed[at], changed[other] = content[other], content[at]
    return bytes(changed)


def packed(folder: Path) -> Path:
    """Pack six images of three classes; return the folder of their shards."""
    for number, kind in enumerate(KINDS):
        for split in ("train", "val"):
            file = folder / "images" / split / f"class{number // 2}" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.effect_noise((40 + number, 30), 50.0).convert("RGB").save(file, kind)
    out = folder / "packed"
    pack(folder / "images", out, PackOptions(), workers=1, progress=lambda split: lambda done, total: None)
    return out


def places(catalog: Catalog) -> list[str]:
    """Return the name and the file of each image, or its shard and bytes."""
    return [catalog.location(index) for index in range(len(catalog))]


def listed(data: Path, lists: Path | None = None) -> list[str]:
    return places(build_catalog(str(data), "train", lists))


def plain(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.tolist()) for name, tensor in tensors.items()}


def checkpoint(folder: Path) -> Path:
    random = torch.Generator().manual_seed(0)
    files = {name: {"w": torch.randn(300, generator=random)} for name in ("model", "ema", "optimizer")}
    return write_checkpoint(folder / "checkpoints", 7, files, {"model": "volo_demo", "seed": 42})


def finetune(folder: Path) -> Case:
    saved = checkpoint(folder)

    def load() -> Any:
        return [plain(read_weights(str(folder), use_ema=use_ema).tensors) for use_ema in (False, True)]

    return sorted(saved.iterdir()), load


def resume(folder: Path) -> Case:
    saved = checkpoint(folder)

    def load() -> Any:
        found = find_checkpoint(str(folder))
        return read_metadata(found), {name: plain(tensors) for name, tensors in read_tensors(found).items()}

    return sorted(saved.iterdir()), load


def torch_file(folder: Path) -> Case:
    file = folder / "weights.pth"
    torch.save({"state_dict": {"w": torch.arange(300.0)}}, file)
    return [file], lambda: bool(read_weights(str(file)).tensors)


def rebuilt_catalog(folder: Path) -> Case:
    data = packed(folder)
    made = build_catalog(str(data), "train", folder / "lists")
    return [made.path], lambda: listed(data, folder / "lists")


def tar_shard(folder: Path) -> Case:
    data = packed(folder)
    (index,) = (data / "train").glob("*.idx")
    index.unlink()
    return list((data / "train").glob("*.tar")), lambda: listed(data)


def indexed_tar_shard(folder: Path) -> Case:
    data = packed(folder)
    return [*(data / "train").glob("*.tar"), *(data / "train").glob("*.idx")], lambda: listed(data)


def record_shards(folder: Path) -> Case:
    files = [folder / "a" / "train" / "0.tfrecord", folder / "b" / "train" / "0.rec"]

    def load() -> bool:
        for number, (name, form) in enumerate((("a", "tfrecord"), ("b", "recordio"))):
            lists = folder / f"lists{number}"
            shutil.rmtree(lists, ignore_errors=True)
            catalog = build_catalog(str(folder / name), "train", lists, records=form)
        return len(catalog) > 0

    shown = [picture(number) for number in range(6)]
    features = [{"image/encoded": image, "image/class/label": len(image) % 3} for image in shown]
    write_tfrecord(files[0], list(map(example, features)))
    write_recordio(
        files[1], [recordio_content(number % 3, number, image) for number, image in enumerate(shown)]
    )
    return files, load


def classes_file(folder: Path) -> Case:
    data = packed(folder)
    return [data / "train" / "classes.txt"], lambda: len(listed(data))


def manifest(folder: Path) -> Case:
    split = packed(folder) / "train"

    def load() -> Any:
        for problem in check_split(split, workers=1, progress=lambda *_: None):
            raise UserError(problem)
        return listed(split.parent)

    return sorted(split.iterdir()), load


def label_store(folder: Path) -> Case:
    catalog = build_catalog(str(packed(folder)), "train", None)
    random = np.random.default_rng(0)
    shape = (3, 4, 5)
    facts: Any = {"classes": 3, "map_shape": shape, "geometry": "whole", "teacher": "a test", "catalog": ""}
    writer = open_writer(folder / "store", catalog_keys(catalog), **facts, shard_rows=4)
    for number in range(writer.shards):
        rows = len(writer.rows(number))
        ids = random.integers(3, size=(rows, *shape)).astype(np.int16)
        writer.write(number, random.normal(size=(rows, *shape)).astype(np.float16), ids, [])
    writer.finish()

    def load() -> Any:
        # As a verification, which finds all damage, and as a training, which is told only of some.
        damage = check_store(folder / "store", catalog, lambda *_: None).damage
        store = LabelStore(folder / "store", catalog, folder / "rows")
        read = [[part.tolist() for part in store.read(index)] for index in range(len(catalog))]
        if damage:
            raise UserError(damage[0])
        return read

    load()
    return [*sorted((folder / "store").iterdir()), *(folder / "rows").iterdir()], load


def recipe(folder: Path) -> Case:
    file = folder / "recipe.toml"
    file.write_bytes((RECIPES / "demo.toml").read_bytes())
    return [file], lambda: bool(load_recipe(str(file)) or True)


def images(folder: Path) -> Case:
    packed(folder)
    catalog = build_catalog(str(folder / "images"), "train", None)
    files = list(map(Path, places(catalog)))
    return files, lambda: [decode_rgb(catalog, index).size > 0 for index in range(len(catalog))]


def scene_shards(folder: Path) -> Case:
    make_scene_set(folder / "scenes", train=3, val=1, side=48)
    out = folder / "packed"
    sizes = {"shard_images": 2, "shard_bytes": 0, "workers": 1}
    pack_scenes(folder / "scenes", out, **sizes, progress=lambda split: lambda done, total: None)

    def load() -> Any:
        scenes = open_scenes(out, "train")
        both = [(scenes.location(index), scenes.mask_location(index)) for index in range(len(scenes))]
        return tuple(scenes.classes), both

    return sorted((out / "train").iterdir()), load


CASES = (finetune, resume, torch_file, rebuilt_catalog, tar_shard, indexed_tar_shard)
CASES += (record_shards, classes_file, manifest, scene_shards, label_store, recipe, images)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::PIL.Image.DecompressionBombWarning")
def test_damaged_files_are_refused_or_read_as_before(case, tmp_path):
    files, load = case(tmp_path)
    expected, outcomes, messages = load(), Counter[str](), list[str]()
    random = np.random.default_rng(0)
    for number in range(MUTATIONS):
        file = files[number % len(files)]
        whole = file.read_bytes()
        file.write_bytes(mutated(whole, random))
        try:
            found = load()
            assert found == expected, f"mutation {number} of {file} is read as other content"
            outcomes["equal"] += 1
        except (UserError, BadSampleError) as error:
            messages.append(str(error))
            outcomes["refused"] += 1
        file.write_bytes(whole)
    print(f"{case.__name__}: {dict(outcomes)}")
    assert not [message for message in messages if "\n" in message]
    assert load() == expected
