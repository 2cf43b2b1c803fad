"""A pack holds what was packed, whole or to be gone on with, and tells every byte that has changed."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from shard_writers import example, picture, write_tar_index, write_tfrecord

from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.pack import main


def write_images(folder, count):
    """Write a data folder; names have dots, and those of one class come in runs."""
    for split, images in (("train", count), ("val", 4)):
        for number in range(images):
            file = folder / split / ["ant", "bee", "cow"][number * 3 // images] / f"{number:03d}.x.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(picture(number))
    (folder / "val/bee/spaces in it.png").write_bytes(picture(0, "PNG"))
    return folder


def content(folder, split):
    """Return class and bytes of every image by its name."""
    catalog = build_catalog(str(folder), split, None)
    return {
        catalog.name(index): (catalog.classes[catalog.targets[index]], catalog.read(index).tobytes())
        for index in range(len(catalog))
    }


def files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


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


def test_the_pack_has_the_same_images_under_the_same_names(images, packed):
    for split in ("train", "val"):
        assert content(packed, split) == content(images, split)
    assert sorted(path.name for path in packed.iterdir()) == ["train", "val"]
    assert sorted(path.name for path in (packed / "train").iterdir()) == [
        "classes.txt",
        "manifest.json",
        *(f"train-00000{number}.{ending}" for number in range(3) for ending in ("idx", "tar")),
    ]


def test_classes_are_mixed_unless_their_order_is_kept(images, packed, tmp_path):
    mixed = build_catalog(str(packed), "train", None).targets
    assert (np.diff(mixed) != 0).sum() > 10
    assert pack(images, tmp_path, "--workers", 1, "--no-shuffle") == 0
    kept, folder = (build_catalog(str(place), "train", None) for place in (tmp_path, images))
    assert kept.digest == folder.digest


def test_others_can_read_the_shards_and_their_index(packed, tmp_path):
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


def test_a_name_with_spaces_leaves_its_shard_without_an_index(packed):
    assert [path.name for path in (packed / "val").glob("*.idx")] == []
    assert "bee/spaces in it.png" in content(packed, "val")


def test_shards_are_as_large_as_asked_for(tmp_path):
    random = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(40):
            file = tmp_path / "images" / split / "a" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            noise = random.integers(0, 256, (300, 300, 3), dtype=np.uint8)
            Image.fromarray(noise).save(file, quality=95)
    assert pack(tmp_path / "images", tmp_path / "out", "--shard-size-mb", 1, "--workers", 1) == 0
    sizes = [path.stat().st_size for path in sorted((tmp_path / "out/train").glob("*.tar"))]
    assert len(sizes) > 2
    assert all(abs(size - 1e6) < 2e5 for size in sizes[:-1])


def test_a_killed_pack_goes_on(tmp_path):
    write_images(tmp_path / "images", 600)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "horovod_volo.pack", tmp_path / "images", out]
    command += ["--workers", "2", "--shard-images", "10"]
    running = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    entries = out / ".packing"
    deadline = time.monotonic() + 60
    while len(list(entries.glob("train-0*.json"))) < 5:
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    workers = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    running.send_signal(signal.SIGKILL)
    running.wait()
    while any(Path(f"/proc/{worker}/exe").exists() for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(workers) >= 2
    assert not (out / "train").exists()
    finished = {json.loads(entry.read_text())["file"] for entry in entries.glob("train-0*.json")}
    before = {name: (out / "train.packing" / name).stat().st_mtime_ns for name in finished}
    assert 5 <= len(finished) < 60
    (out / "train.packing/.train-000059.tar.x.partial").touch()  # what a worker may leave

    subprocess.run(command, check=True)
    assert content(out, "train") == content(tmp_path / "images", "train")
    assert {name: (out / "train" / name).stat().st_mtime_ns for name in finished} == before
    assert pack(tmp_path / "images", tmp_path / "again", *command[-4:]) == 0
    assert files(out) == files(tmp_path / "again")
    assert pack(*command[3:]) == 0  # there is nothing to do


def test_a_killed_worker_is_told_at_once(tmp_path):
    write_images(tmp_path / "images", 3000)
    out = tmp_path / "out"
    command = [sys.executable, "-m", "horovod_volo.pack", tmp_path / "images", out]
    command += ["--workers", "2", "--shard-images", "10"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list((out / ".packing").glob("train-0*.json")):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.001)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    worker = next(child for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text())
    os.kill(int(worker), signal.SIGKILL)
    _, said = running.communicate(timeout=20)
    assert running.returncode == 2
    assert "a packing process was killed" in said
    assert "Traceback" not in said


def test_another_pack_in_the_same_place_is_refused(images, packed, tmp_path, capsys):
    assert pack(images, packed, "--shard-images", 16, "--seed", 1) == 2
    assert "train is of other images, or of other settings. Give the same command" in capsys.readouterr().err
    assert pack(images, images) == 2
    assert "train has no manifest.json: it is no packed split. Name another" in capsys.readouterr().err
    assert not (images / ".packing").exists()
    assert pack(tmp_path / "nowhere", tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith("error: there is no data folder")


def test_verify_finds_what_has_changed(packed, tmp_path, capsys):
    for name, data in files(packed).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert pack(tmp_path, "--verify") == 0
    assert f"{tmp_path}/train: 40 images in 3 shards" in capsys.readouterr().out
    shard, index = tmp_path / "train/train-000001.tar", tmp_path / "train/train-000002.idx"
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    index.unlink()
    (tmp_path / "train/other.tar").touch()
    assert pack(tmp_path, "--verify") == 1
    told = capsys.readouterr().err
    assert f"{shard} is damaged: its sum is another" in told
    assert f"{index} is missing" in told
    assert "other.tar is not in manifest.json" in told
    assert "000000" not in told
    (tmp_path / "train/manifest.json").write_bytes(b"{")
    assert pack(tmp_path, "--verify") == 2


def test_images_are_shrunk_but_never_enlarged(tmp_path):
    sizes = {"wide.png": (90, 40), "high.jpg": (50, 201), "small.png": (30, 70)}
    for split in ("train", "val"):
        (tmp_path / f"images/{split}/a").mkdir(parents=True)
        for name, size in sizes.items():
            Image.radial_gradient("L").resize(size).save(tmp_path / f"images/{split}/a" / name)
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


def test_damaged_images_are_named_and_left_out(tmp_path, capsys):
    folder = write_images(tmp_path / "images", 12)
    damaged = folder / "train/ant/000.x.jpg"
    damaged.write_bytes(picture(0)[:-30])
    (folder / "train/bee/005.x.jpg").write_bytes(b"")
    arguments = (folder, tmp_path / "out", "--workers", 1, "--shard-images", 5)
    assert pack(*arguments) == 1
    told = capsys.readouterr().err
    assert f"{damaged} cannot be decoded: " in told
    assert "005.x.jpg is empty" in told
    assert "2 images were left out" in told
    assert pack(*arguments, "--bad-samples", "skip") == 0  # and again they are told
    assert "2 images were left out" in capsys.readouterr().err
    assert len(content(tmp_path / "out", "train")) == 10


def test_names_without_an_ending_get_one(tmp_path):
    for split in ("train", "val"):
        features = {"image/encoded": picture(3, "PNG"), "image/class/label": 1, "image/filename": "x"}
        write_tfrecord(tmp_path / f"images/{split}/s.tfrecord", [example(features)])
    assert pack(tmp_path / "images", tmp_path / "out", "--workers", 1) == 0
    assert content(tmp_path / "out", "val") == {"1/x.png": ("1", picture(3, "PNG"))}


def test_the_command_line_tells_what_it_wants(capsys):
    for arguments in (["one"], ["a", "b", "c"], ["a", "b", "--quality", "101"], ["a", "b", "--workers", "0"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    assert "takes a whole number of at least 1, not '0'" in capsys.readouterr().err


def test_the_tool_answers_at_once(tmp_path):
    tool = Path(__file__).parents[2] / "tools/pack"
    answer = subprocess.run(
        [tool, "--help"], cwd=tmp_path, capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert "DATA_DIR OUT_DIR" in answer.stdout
