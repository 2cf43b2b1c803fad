"""Packed images and masks are those of the folder, in its order; what is missing is named in one message."""

import pickle
import shutil
import tarfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from box_samples import rank_alone
from PIL import Image
from shard_writers import in_this_process

from horovod_volo.core.errors import BadSampleError, UserError
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.images.split_folder import Split
from horovod_volo.data.packing import packed_split
from horovod_volo.data.packing.manifest import read_manifest
from horovod_volo.data.packing.pack import PackOptions, pack
from horovod_volo.data.packing.packed_split import TarWriter
from horovod_volo.demo.scene_set import make_scene_set
from horovod_volo.dense.mean_iou import SceneEvalLoader
from horovod_volo.dense.scene_list import SceneList
from horovod_volo.dense.scene_shards import SceneShards, open_scenes
from horovod_volo.pack import main

SPLITS: tuple[Split, ...] = ("train", "val")
ALONE = rank_alone()
PIXELS = np.arange(24, dtype=np.uint8).reshape(4, 6)


@pytest.fixture(autouse=True)
def _pack_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing with several processes is tested in test_data_pack.py."""
    monkeypatch.setattr(packed_split, "run_in_processes", in_this_process)


def packed(data: Path, out: Path, *arguments: object) -> Path:
    assert main([str(data), str(out), "--workers", "1", *map(str, arguments)]) == 0
    return out


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn") / "set"
    make_scene_set(folder, train=12, val=5, side=48)
    return folder


def save(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(PIXELS).save(path)


def plain(folder: Path) -> Path:
    """Write one's own layout, with names that are long, not ASCII, with spaces, dots and capitals."""
    names = ("b.jpg", "a.mask.png", "a/b c.x.JPG", "é/ü.jpeg", f"{'long' * 30}.jpg", "a.jpg", "b.png")
    for split in SPLITS:
        for name in names:
            save(folder / "images" / split / name)
            save((folder / "masks" / split / name).with_suffix(".png"))
    (folder / "classes.txt").write_text("".join(f"klasse ä{number}\n" for number in range(24)))
    return folder


def ade20k(folder: Path) -> Path:
    for split in ("training", "validation"):
        for number in range(3):
            save(folder / "images" / split / f"ADE_{number}.jpg")
            save(folder / "annotations" / split / f"ADE_{number}.png")
    return folder


def assert_same(files: SceneList, shards: SceneList) -> None:
    assert isinstance(shards, SceneShards)
    assert (shards.names, shards.digest, len(shards)) == (files.names, files.digest, len(files))
    assert tuple(shards.classes) == tuple(files.classes)
    for name in ("name", "classes", "zero_is_ignored"):
        assert getattr(shards.layout, name) == getattr(files.layout, name)
    for index in range(len(files)):
        assert shards.read(index).tobytes() == Path(files.location(index)).read_bytes()
        assert shards.encoded_mask(index) == files.mask_path(index).read_bytes()
        with Image.open(files.mask_path(index)) as mask:
            size = (mask.height, mask.width)
        assert np.array_equal(shards.read_mask(index, size), files.read_mask(index, size))


@pytest.mark.parametrize("write", [plain, ade20k])
def test_every_layout_is_packed_unchanged(write: Callable[[Path], Path], tmp_path: Path) -> None:
    data = write(tmp_path / "data")
    out = packed(data, tmp_path / "out", "--shard-images", 2)
    for split in SPLITS:
        scenes = open_scenes(out, split)
        assert_same(open_scenes(data, split), scenes)
        assert_same(open_scenes(data, split), pickle.loads(pickle.dumps(scenes)))  # as it is sent to ranks
    assert main([str(out), "--verify"]) == 0


def test_shards_are_webdatasets_and_can_be_packed_again(drawn: Path, tmp_path: Path) -> None:
    out = packed(drawn, tmp_path / "out", "--shard-images", 5)
    assert sorted(path.name for path in (out / "train").iterdir()) == [
        "classes.txt",
        "manifest.json",
        *(f"train-00000{number}.{ending}" for number in range(3) for ending in ("idx", "tar")),
    ]
    with tarfile.open(out / "train/train-000001.tar") as shard:
        assert shard.getnames()[:3] == ["00005.jpg", "00005.mask.png", "00006.jpg"]
    again = packed(out, tmp_path / "again", "--shard-images", 5)
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert all((out / file).read_bytes() == (again / file).read_bytes() for file in files)


def test_damaged_images_and_masks_are_packed_unchanged(drawn: Path, tmp_path: Path) -> None:
    """So that a run on shards replaces them by the same other ones."""
    data = shutil.copytree(drawn, tmp_path / "data")
    image, mask = data / "images/train/00003.jpg", data / "masks/train/00007.png"
    image.write_bytes(image.read_bytes()[:300])
    mask.write_bytes(b"")
    shards = open_scenes(packed(data, tmp_path / "out", "--shard-images", 5), "train")
    assert shards.digest == open_scenes(data, "train").digest
    assert shards.read(3).tobytes() == image.read_bytes()
    with pytest.raises(BadSampleError, match=r"train-000001\.tar, bytes .*00007\.mask\.png\) is not a"):
        shards.read_mask(7, (48, 48))
    with closing(SceneEvalLoader(shards, ALONE)) as loader:
        assert [scene.number for scene in loader] == [index for index in range(12) if index not in (3, 7)]
        assert loader.damaged == 2


def without_a_mask(split: Path) -> None:
    """Write the first shard again without a mask, and a manifest that fits it."""
    path = split / "train-000000.tar"
    with path.open("wb") as file:
        writer = TarWriter(file)
        writer.add(("00000.jpg", b"x"), ("00000.mask.png", b"x"))
        writer.add(("00001.jpg", b"x"))
        writer.add(("00002.jpg", b"x"), ("00002.mask.png", b"x"))
        writer.finish()
    path.with_suffix(".idx").unlink()
    manifest = read_manifest(split)
    first, *others = manifest.shards
    replace(manifest, shards=(replace(first, bytes=path.stat().st_size), *others)).write(split)


def without_a_shard(split: Path) -> None:
    manifest = read_manifest(split)
    replace(manifest, shards=manifest.shards[1:]).write(split)


def cut(split: Path) -> None:
    shard = split / "train-000001.tar"
    shard.write_bytes(shard.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"train-000001\.tar has 5,000 bytes instead of .*Copy this shard again, or make it again\."),
        (lambda split: (split / "train-000001.tar").unlink(), r"train-000001\.tar cannot be read: No such"),
        (without_a_mask, r"train-000000\.tar has 00001\.jpg without its mask"),
        (without_a_shard, r"does not hold the images or the classes that manifest\.json there was"),
        (lambda split: (split / "classes.txt").write_text("a\nb\n"), "does not hold the images or the"),
        (lambda split: (split / "manifest.json").unlink(), r"has no manifest\.json"),
    ],
)
def test_what_is_missing_is_named(damage, message, drawn, tmp_path):
    out = packed(drawn, tmp_path / "out", "--shard-images", 5)
    damage(out / "train")
    with pytest.raises(UserError, match=message) as raised:
        open_scenes(out, "train")
    assert "\n" not in str(raised.value)
    assert len(open_scenes(out, "val")) == 5


def test_a_shard_that_is_cut_or_goes_during_a_run_is_bad_samples(drawn: Path, tmp_path: Path) -> None:
    out = packed(drawn, tmp_path / "out", "--shard-images", 5)
    scenes = open_scenes(out, "train")
    cut(out / "train")
    (out / "train/train-000002.tar").unlink()
    assert scenes.read(0).size > 0
    with pytest.raises(BadSampleError, match=r"00006\.mask\.png\) cannot be read: the shard has been cut"):
        scenes.encoded_mask(6)
    with pytest.raises(BadSampleError, match=r"train-000002\.tar, bytes .* cannot be read: No such file"):
        scenes.read(11)


def test_packed_images_with_classes_and_with_masks_are_told_apart(drawn: Path, tmp_path: Path) -> None:
    for split in SPLITS:
        save(tmp_path / "images" / split / "a" / "1.png")
    options: Any = {"workers": 1, "progress": lambda split: lambda done, total: None}
    pack(tmp_path / "images", tmp_path / "classes", PackOptions(), **options)
    with pytest.raises(UserError, match="holds packed images without masks"):
        open_scenes(tmp_path / "classes", "train")
    out = packed(drawn, tmp_path / "out")
    with pytest.raises(UserError, match="holds images with masks, not with classes"):
        build_catalog(str(out), "train", None)
    with pytest.raises(UserError, match="There is no folder"):
        open_scenes(tmp_path / "nowhere", "train")


def test_mistakes_in_packing_are_explained(drawn, tmp_path, capsys):
    out = tmp_path / "out"
    packed(drawn, out, "--shard-images", 5)
    packed(drawn, out, "--shard-images", 5)  # it is left as it is
    data = plain(tmp_path / "data")
    (data / "masks/val/b.png").unlink()
    (data / "masks/val/b.png").mkdir()
    for argv, message in (
        ([drawn, tmp_path / "new", "--resize", 32], "Drop --resize"),
        ([drawn, drawn], "Name another folder"),
        ([drawn, out, "--shard-images", 4], "was packed from other images or with other options"),
        ([data, tmp_path / "other", "--workers", 1], "masks/val/b.png cannot be read: Is a directory"),
    ):
        assert main(list(map(str, argv))) == 2
        assert message in capsys.readouterr().err
