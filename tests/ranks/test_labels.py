"""Generated labels are the teacher's, and the same on one rank, on several, and after a killed attempt."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.models.build import build_model
from horovod_volo.token_labels.store import LabelStore
from tests.ranks.launching import HERE, environment, launcher, python, ranks_of, run

IMAGES, CLASSES, DAMAGED = 40, 10, 17
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with images, one of them damaged, and a teacher's weights."""
    folder = tmp_path_factory.mktemp("labels")
    make_demo_set(folder / "set", train=IMAGES, val=10)
    catalog = build_catalog(str(folder / "set"), "train", None)
    damaged = folder / "set" / "train" / catalog.name(DAMAGED)
    damaged.write_bytes(damaged.read_bytes()[:200])
    torch.manual_seed(0)
    network = build_model("volo_demo", img_size=64, num_classes=CLASSES, drop_path=0.0)
    torch.nn.init.constant_(network.aux_head.bias, 0.01)  # with biases of 0 the head is taken for untrained
    torch.save(network.state_dict(), folder / "teacher.pt")
    return folder


def generate(folder: Path, out: Path, *, ranks: int, start_with: str) -> list[dict[str, object]]:
    arguments = (str(folder / "set"), str(folder / "teacher.pt"), "0")
    return ranks_of("labels", out, *arguments, ranks=ranks, start_with=start_with)


def read_maps(folder: Path, store: Path) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    catalog = build_catalog(str(folder / "set"), "train", None)
    labels = LabelStore(store, catalog, None)
    return {index: labels.read(index) for index in range(IMAGES) if index != DAMAGED}


@pytest.fixture(scope="module")
def alone(folder):
    found = generate(folder, folder / "alone", ranks=1, start_with="none")
    assert found[0]["images"] == IMAGES
    assert found[0]["progress"][0] == [0, IMAGES]
    assert found[0]["progress"][-1] == [IMAGES, IMAGES]
    return folder / "alone" / "store"


def test_labels_equal_the_teachers_centred_logits(folder, alone):
    catalog = build_catalog(str(folder / "set"), "train", None)
    network = build_model("volo_demo", img_size=64, num_classes=CLASSES, drop_path=0.0).eval()
    network.load_state_dict(torch.load(folder / "teacher.pt", weights_only=True))
    for index, (scores, ids) in read_maps(folder, alone).items():
        with Image.open(folder / "set" / "train" / catalog.name(index)) as image:
            pixels = torch.from_numpy(np.array(image.convert("RGB").resize((64, 64)))) / 255
        with torch.inference_mode():
            tokens = network.forward_features(((pixels - MEAN) / STD).permute(2, 0, 1)[None])[:, 1:]
            logits = network.aux_head(tokens)[0].T.reshape(CLASSES, 4, 4)
        others = logits.exp().scatter(0, torch.from_numpy(ids).long(), 0.0).sum(dim=0) / (CLASSES - len(ids))
        logits = logits - others.log()
        named = torch.gather(logits, 0, torch.from_numpy(ids).long())
        assert (torch.from_numpy(scores).float() - named).abs().max() < 0.02, (
            "the labels are of other pixels or another cell"
        )
        assert (np.diff(scores.astype(np.float32), axis=0) <= 0).all()
        assert (named[0] > logits.amax(dim=0) - 0.04).all()


@pytest.mark.parametrize(("ranks", "start_with"), [(2, "gloo"), (3, "mpi")])
def test_several_ranks_write_the_same_store(folder, alone, ranks, start_with):
    out = folder / f"{ranks}"
    found = generate(folder, out, ranks=ranks, start_with=start_with)
    assert all(rank["problems"] == found[0]["problems"] for rank in found)
    (problem,) = found[0]["problems"]
    assert "cannot be decoded: " in problem
    files = content_of(out / "store")
    assert files == content_of(alone)
    assert len(files) == 2 + -(-IMAGES // 6)


def test_a_killed_command_is_resumed(folder, alone):
    out = folder / "killed"
    out.mkdir()
    command = [*python(), str(HERE / "worker_labels.py"), str(out), str(folder / "set")]
    with subprocess.Popen(
        [*launcher("gloo", 2), *command, str(folder / "teacher.pt"), "0.3"],
        env=environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        first = out / "store" / "maps-00000.json"
        deadline = time.monotonic() + 240  # on a loaded machine two ranks start slowly
        while not first.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    wait_until_ended(out)
    assert first.exists()
    assert not (out / "store" / "store.json").exists()
    written = (out / "store" / "maps-00000.safetensors").stat().st_mtime_ns
    (rank,) = generate(folder, out, ranks=1, start_with="none")
    assert rank["progress"][0][1] < IMAGES
    assert len(rank["problems"]) == 1
    assert (out / "store" / "maps-00000.safetensors").stat().st_mtime_ns == written
    assert content_of(out / "store") == content_of(alone)


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def wait_until_ended(out: Path) -> None:
    """Wait until all ranks of a killed launch have ended: horovodrun starts each in its own session."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        ranks = subprocess.run(["pgrep", "-f", f"worker_labels.py {out} "], capture_output=True, text=True)
        if not ranks.stdout:
            return
        for rank in ranks.stdout.split():
            subprocess.run(["kill", "-9", rank], capture_output=True)
        time.sleep(0.1)


def test_the_command_runs_on_two_ranks(folder, tmp_path):
    command = [*python(), "-m", "horovod_volo.labels"]
    generate = [*command, "generate", str(folder / "set"), str(tmp_path / "s")]
    options = ["--teacher", "volo_demo", "--img-size", "64"]
    done = run([*launcher("gloo", 2), *generate, *options])
    assert done.returncode != 0
    assert done.stdout.count("the teacher volo_demo has no weights yet") == 1
    done = run([*launcher("gloo", 2), *generate, *options, "--teacher-weights", str(folder / "teacher.pt")])
    assert done.returncode == 0, done.stdout
    assert f"{tmp_path / 's'}: {IMAGES - 1} maps, 1 left out" in done.stdout
    assert "40/40 images of rank 0 of 2, " in done.stdout
    assert done.stdout.count("cannot be decoded") == 1
    verified = run([*command, "verify", str(tmp_path / "s"), "--data", str(folder / "set")])
    assert verified.returncode == 0, verified.stdout
    assert "images without a map   1\n" in verified.stdout
    assert "a map covers           the whole image\n" in verified.stdout
