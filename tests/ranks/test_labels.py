"""Generated labels are the same on one rank, on several, and after a killed attempt."""

import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from horovod_volo.cluster.world import World
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.labelling.generate import TeacherChoice, generate_labels
from horovod_volo.labels import main
from horovod_volo.models.build import build_model
from tests.ranks.launching import alone, launcher, on_ranks, python, run

IMAGES, CLASSES, DAMAGED = 40, 10, 17


@pytest.fixture(scope="module")
def folder(images, tmp_path_factory):
    """Return a folder with images, one of them damaged, and a teacher's weights."""
    folder = tmp_path_factory.mktemp("labels")
    shutil.copytree(images, folder / "set")
    catalog = build_catalog(str(folder / "set"), "train", None)
    damaged = folder / "set" / "train" / catalog.name(DAMAGED)
    damaged.write_bytes(damaged.read_bytes()[:200])
    torch.manual_seed(0)
    network = build_model("volo_demo", img_size=64, num_classes=CLASSES, drop_path=0.0)
    torch.nn.init.constant_(network.aux_head.bias, 0.01)  # with biases of 0 the head is taken for untrained
    torch.save(network.state_dict(), folder / "teacher.pt")
    return folder


def generate(world: World, *, folder: Path, out: Path, killed_at: int = 0) -> dict[str, Any]:
    """Generate labels, with shards so small that every rank writes several; rank 1 may be killed."""
    teacher = TeacherChoice("volo_demo", str(folder / "teacher.pt"), image_side=64, batch_size=2)
    calls: list[list[int]] = []

    def progress(done: int, total: int) -> None:
        calls.append([done, total])
        if world.rank == 1 and len(calls) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    images, problems = generate_labels(
        str(folder / "set"), out / "store", teacher, 3, world, progress, shard_rows=6
    )
    return {"images": images, "problems": problems, "progress": calls}


@pytest.fixture(scope="module")
def by_one(folder):
    found = alone(partial(generate, folder=folder, out=folder / "alone"))
    assert found["images"] == IMAGES
    assert found["progress"][0] == [0, IMAGES]
    assert found["progress"][-1] == [IMAGES, IMAGES]
    return folder / "alone" / "store"


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_several_ranks_write_the_same_store(folder, by_one):
    out = folder / "3"
    (found,) = on_ranks(out, partial(generate, folder=folder, out=out), ranks=3, start_with="mpi")
    assert all(rank["problems"] == found[0]["problems"] for rank in found)
    (problem,) = found[0]["problems"]
    assert "cannot be decoded: " in problem
    files = content_of(out / "store")
    assert files == content_of(by_one)
    assert b'"missing": 1' in files["store.json"]  # of the damaged image
    assert len(files) == 2 + -(-IMAGES // 6)


def test_a_killed_command_is_resumed(folder, by_one):
    out = folder / "killed"
    with pytest.raises(AssertionError, match="rank"):  # of the launch
        on_ranks(out, partial(generate, folder=folder, out=out, killed_at=6))
    # The shard of the damaged image, maps-00002, is written again: the image may have been repaired.
    written = {file: file.stat().st_mtime_ns for file in (out / "store").glob("maps-0000[!2].safetensors")}
    assert written
    assert not (out / "store" / "store.json").exists()
    found = alone(partial(generate, folder=folder, out=out))
    assert found["progress"][0][1] < IMAGES
    assert len(found["problems"]) == 1
    assert {file: file.stat().st_mtime_ns for file in written} == written
    assert content_of(out / "store") == content_of(by_one)


def test_the_command_runs_on_two_ranks(folder, tmp_path, capfd):
    teacher = ["--teacher", "volo_demo", "--img-size", "64"]
    command = ["generate", str(folder / "set"), str(tmp_path / "s"), *teacher]
    assert main(command) != 0
    assert "the teacher volo_demo has no weights yet" in capfd.readouterr().err
    program = [*launcher("gloo", 2), *python(), "-m", "horovod_volo.labels"]
    done = run([*program, *command, "--teacher-weights", str(folder / "teacher.pt")])
    assert done.returncode == 0, done.stdout
    assert f"{tmp_path / 's'}: {IMAGES - 1} maps, 1 left out" in done.stdout
    assert "40/40 images of rank 0 of 2, " in done.stdout
    assert done.stdout.count("cannot be decoded") == 1
    assert main(["verify", str(tmp_path / "s"), "--data", str(folder / "set")]) == 0
    shown = capfd.readouterr().out
    assert "images without a map   1\n" in shown
    assert "a map covers           the whole image\n" in shown
