"""Packing keeps images and names, is reproducible, can be resumed, and verifies checksums."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from coded_images import contents, files_below
from coded_images import write_images as save_images
from PIL import Image, features
from shard_writers import example, picture, write_tar_index, write_tfrecord

from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.packing import packed_split as packing
from horovod_volo.pack import main
from tests.ranks.launching import wait_until


def write_images(folder, count):
    """Write a data folder; names contain dots, one is not ASCII; numbers continue from class to class."""
    for split, images in (("train", count), ("val", 4)):
        for number in range(images):
            file = folder / split / ["ant", "bee", "cow"][number * 3 // images] / f"{number:03d}.x.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(picture(number))
        (folder / split / "cow" / f"{'é' * 60}.jpg").write_bytes(picture(number))
    (folder / "val/bee/spaces in it.png").write_bytes(picture(0, "PNG"))
    return folder


def content(folder, split):
    return {name: rest for name, *rest in contents(build_catalog(str(folder), split, None))}


def pack(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"), 40)


@pytest.fixture(scope="module")
def packed(images, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed")
    assert pack(images, out, "--workers", 2, "--shard-images", 16) == 0
    return out


def test_images_and_names_are_unchanged(images, packed):
    for split in ("train", "val"):
        assert content(packed, split) == content(images, split)
    assert sorted(path.name for path in packed.iterdir()) == ["train", "val"]
    assert sorted(path.name for path in (packed / "train").iterdir()) == [
        "classes.txt",
        "images.catalog",
        "manifest.json",
        *(f"train-00000{number}.{ending}" for number in range(3) for ending in ("idx", "tar")),
    ]


@pytest.mark.parametrize("kind", ["GIF", "PPM", *(["AVIF"] if features.check("avif") else [])])
def test_images_that_are_found_in_shards_whatever_they_are_called(tmp_path, kind):
    """Members of tar shards are images by their names."""
    pictures = [picture(number, kind) for number in range(2)]
    records = [example({"image/encoded": image, "image/class/label": n}) for n, image in enumerate(pictures)]
    for split in ("train", "val"):
        write_tfrecord(tmp_path / f"images/{split}/s.tfrecord", records)
    assert pack(tmp_path / "images", tmp_path / "out", "--workers", 1, "--from", "tfrecord") == 0
    found = content(tmp_path / "out", "train").values()
    assert sorted(image for _, image in found) == sorted(pictures)


def test_classes_are_mixed_without_no_shuffle(images, packed, tmp_path):
    mixed = build_catalog(str(packed), "train", None).targets
    assert (np.diff(mixed) != 0).sum() > 10
    assert pack(images, tmp_path, "--workers", 1, "--no-shuffle") == 0
    unshuffled, folder = (build_catalog(str(path), "train", None) for path in (tmp_path, images))
    assert unshuffled.digest == folder.digest


def test_shards_and_indexes_have_the_formats_of_webdataset_and_dali(packed, tmp_path):
    shard = packed / "train/train-000001.tar"
    with tarfile.open(shard) as tar:
        names = tar.getnames()
        assert len(names) == 32
        image, label = names[:2]
        assert label == f"{image.partition('.')[0]}.cls"
        assert tar.extractfile(label).read() == str(["ant", "bee", "cow"].index(image[:3])).encode()
    copy = tmp_path / shard.name
    copy.write_bytes(shard.read_bytes())
    write_tar_index(copy)
    assert copy.with_suffix(".idx").read_text() == shard.with_suffix(".idx").read_text()


def test_a_shard_with_spaces_in_a_name_has_no_index(packed):
    assert [path.name for path in (packed / "val").glob("*.idx")] == []
    assert "bee/spaces in it.png" in content(packed, "val")


def test_shards_have_the_requested_size(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (40, 300, 300, 3), dtype=np.uint8)
    for split in ("train", "val"):
        images = {f"{split}/a/{number}.jpg": Image.fromarray(pixels) for number, pixels in enumerate(noise)}
        save_images(tmp_path / "images", images, quality=95)
    assert pack(tmp_path / "images", tmp_path / "out", "--shard-size-mb", 1, "--workers", 1) == 0
    sizes = [path.stat().st_size for path in sorted((tmp_path / "out/train").glob("*.tar"))]
    assert len(sizes) > 2
    assert all(abs(size - 1e6) < 2e5 for size in sizes[:-1])


def begun(folder, images, shards):
    """Begin to pack so many images in a process; return its command and it, once it has finished shards."""
    write_images(folder / "images", images)
    command = [sys.executable, "-m", "horovod_volo.pack", folder / "images", folder / "out"]
    command += ["--workers", "2", "--shard-images", "10"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    plan = folder / "out/.packing"
    wait_until(lambda: len(list(plan.glob("train-0*.json"))) >= shards, 60, "them", str, 0.001, running)
    return command, running


def test_a_killed_pack_is_resumed(tmp_path):
    out, records = tmp_path / "out", tmp_path / "out/.packing"
    command, running = begun(tmp_path, 400, 5)
    workers = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.kill()
    running.communicate()
    wait_until(lambda: not any(Path(f"/proc/{worker}/exe").exists() for worker in workers), 60, "their end")
    assert len(workers) >= 2
    assert not (out / "train").exists()
    finished = {json.loads(record.read_text())["file"] for record in records.glob("train-0*.json")}
    before = {name: (out / "train.packing" / name).stat().st_mtime_ns for name in finished}
    assert 5 <= len(finished) < 40
    (out / "train.packing/.train-000039.tar.x.partial").touch()  # the temporary file of a killed worker

    subprocess.run(command, check=True)
    assert content(out, "train") == content(tmp_path / "images", "train")
    assert {name: (out / "train" / name).stat().st_mtime_ns for name in finished} == before
    assert pack(tmp_path / "images", tmp_path / "again", *command[-4:]) == 0
    assert files_below(out) == files_below(tmp_path / "again")
    assert pack(*command[3:]) == 0  # a finished pack is left as it is


def test_a_killed_worker_ends_the_command(tmp_path):
    _, running = begun(tmp_path, 2000, 1)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    worker = next(child for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text())
    os.kill(int(worker), signal.SIGKILL)
    _, stderr = running.communicate(timeout=20)
    assert running.returncode == 2
    assert "a worker process was killed" in stderr
    assert "Traceback" not in stderr


def test_another_pack_in_the_same_folder_is_refused(images, packed, tmp_path, capsys):
    copied = shutil.copytree(images, tmp_path / "copied")
    for source, *flags in ((images, "--seed", 1), (copied,)):
        assert pack(source, packed, "--shard-images", 16, *flags) == 2
        assert "train was packed from other images" in capsys.readouterr().err
    assert pack(images, images) == 2
    assert "train has no manifest.json: it is not a packed split. Name another" in capsys.readouterr().err
    assert not (images / ".packing").exists()
    assert pack(tmp_path / "nowhere", tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith("error: there is no data folder")


def test_a_pack_that_an_earlier_version_began_in_another_order_is_refused(
    images, tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patched:
        patched.setattr(packing, "_publish", lambda *_: sys.exit(3))
        with pytest.raises(SystemExit, match="3"):
            pack(images, tmp_path, "--workers", 1)
    plan = tmp_path / ".packing/train.plan.json"
    plan.write_text(json.dumps({**json.loads(plan.read_text()), "order": 1}))
    assert pack(images, tmp_path, "--workers", 1) == 2
    assert "remove this one" in capsys.readouterr().err
    plan.unlink()  # the shards that are finished are of this plan
    assert pack(images, tmp_path, "--workers", 1, "--shard-images", 20) == 0
    assert content(tmp_path, "train") == content(images, "train")


def test_verify_finds_every_change(packed, tmp_path, capsys):
    shutil.copytree(packed, tmp_path, dirs_exist_ok=True)
    assert pack(tmp_path, "--verify") == 0
    assert f"{tmp_path}/train: 41 images in 3 shards" in capsys.readouterr().out
    shard, index = tmp_path / "train/train-000001.tar", tmp_path / "train/train-000002.idx"
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    index.unlink()
    (tmp_path / "train/other.tar").touch()
    assert pack(tmp_path, "--verify") == 1
    stderr = capsys.readouterr().err
    assert f"{shard} is damaged: its checksum differs" in stderr
    assert f"{index} is missing" in stderr
    assert "other.tar is not in manifest.json" in stderr
    assert "000000" not in stderr
    (tmp_path / "train/manifest.json").write_bytes(b"{")
    assert pack(tmp_path, "--verify") == 2


def test_images_are_reduced_but_never_enlarged(tmp_path):
    sizes = {"wide.png": (90, 40), "high.jpg": (50, 201), "small.png": (30, 70)}
    pictures = {name: Image.radial_gradient("L").resize(size) for name, size in sizes.items()}
    for split in ("train", "val"):
        save_images(tmp_path / "images", {f"{split}/a/{name}": image for name, image in pictures.items()})
    assert pack(tmp_path / "images", tmp_path / "out", "--resize", 32, "--workers", 1) == 0
    found = content(tmp_path / "out", "train")
    assert sorted(found) == ["a/high.jpg", "a/small.png", "a/wide.png.jpg"]
    assert found["a/small.png"][1] == (tmp_path / "images/train/a/small.png").read_bytes()
    for name, source, size in (("wide.png.jpg", "wide.png", (72, 32)), ("high.jpg", "high.jpg", (32, 129))):
        small = Image.open(io.BytesIO(found[f"a/{name}"][1]))
        assert (small.format, small.mode, small.size) == ("JPEG", "RGB", size)
        with Image.open(tmp_path / "images/train/a" / source) as large:
            expected = large.convert("RGB").resize(size, Image.Resampling.BICUBIC)
        assert np.abs(np.asarray(small, int) - np.asarray(expected, int)).mean() < 2


def test_damaged_images_are_reported_and_left_out(tmp_path, capsys):
    folder = write_images(tmp_path / "images", 12)
    damaged = folder / "train/ant/000.x.jpg"
    damaged.write_bytes(picture(0)[:-30])
    (folder / "train/bee/005.x.jpg").write_bytes(b"")
    arguments = (folder, tmp_path / "out", "--workers", 1, "--shard-images", 5)
    assert pack(*arguments) == 1
    stderr = capsys.readouterr().err
    assert f"{damaged} cannot be decoded: " in stderr
    assert "005.x.jpg is empty" in stderr
    assert "2 images were left out" in stderr
    assert pack(*arguments, "--bad-samples", "skip") == 0  # reported again
    assert "2 images were left out" in capsys.readouterr().err
    assert len(content(tmp_path / "out", "train")) == 11
