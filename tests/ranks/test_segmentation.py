"""Segmentation end to end: it resumes to the bit, leaves out what is damaged, and counts each pixel once."""

import io
import json

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from horovod_volo.demo.scene_set import make_scene_set
from tests.ranks.launching import python, ranks_of, run, train

SMALL = (
    *("--recipe", "segmentation_demo", "--img-size", "64", "--scene-size", "192", "64", "--epochs", "2"),
    *("--photometric", "--drop-path", "0.2", "--ema-decay", "0.9", "--log-every", "1", "--name", "run"),
)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes") / "set"
    make_scene_set(folder, train=24, val=9, side=64)
    return folder


def start(scenes, output, *arguments, **settings):
    return train(str(scenes), *SMALL, "--output", str(output), *arguments, **settings)


def weights(output):
    folder = output / "run" / "checkpoints" / "last"
    return {
        (file.name, name): tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def metrics(output):
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_stopped_run_resumes_to_the_bit(scenes, tmp_path):
    whole = start(scenes, tmp_path / "whole", ranks=2, start_with="gloo")
    assert whole.returncode == 0, whole.stdout
    assert "24 training and 9 held-out images with masks, plain layout, 7 classes" in whole.stdout
    assert "after epoch 2 of 2: mean IoU " in whole.stdout
    stopped = start(scenes, tmp_path / "cut", "--stop-at-step", "2", ranks=2, start_with="mpi")
    assert stopped.returncode == 75, stopped.stdout
    resumed = start(scenes, tmp_path / "cut", "--resume", "auto", ranks=2, start_with="gloo")
    assert resumed.returncode == 0, resumed.stdout
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert len(expected) > 300
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    board = EventAccumulator(str(tmp_path / "cut" / "run"))
    board.Reload()
    assert board.Tags()["images"] == [f"evaluation/image {number:05}" for number in (0, 2, 4, 6)]
    (*_, picture) = board.Images("evaluation/image 00002")
    with Image.open(io.BytesIO(picture.encoded_image_string)) as shown:
        assert shown.size == (picture.width, picture.height)
    steps = [record["step"] for record in metrics(tmp_path / "cut") if "pixel_loss" in record]
    assert steps == list(range(1, 7))
    assert [record["miou"] for record in metrics(tmp_path / "cut") if "miou" in record] == [
        record["miou"] for record in metrics(tmp_path / "whole") if "miou" in record
    ]


def test_packed_scenes_train_the_same_network_to_the_bit(scenes, tmp_path):
    packed = tmp_path / "packed"
    done = run([*python(), "-m", "horovod_volo.pack", str(scenes), str(packed), "--shard-images", "7"])
    assert done.returncode == 0, done.stdout
    alone = {"ranks": 1, "start_with": "none"}
    whole = start(scenes, tmp_path / "folder", **alone)
    assert whole.returncode == 0, whole.stdout
    # A run on the folder goes on with the shards.
    stopped = start(scenes, tmp_path / "shards", "--stop-at-step", "1", **alone)
    assert stopped.returncode == 75, stopped.stdout
    resumed = start(packed, tmp_path / "shards", "--resume", "auto", **alone)
    assert resumed.returncode == 0, resumed.stdout
    assert "24 training and 9 held-out images with masks, plain layout, 7 classes" in resumed.stdout
    expected, found = weights(tmp_path / "folder"), weights(tmp_path / "shards")
    assert len(expected) > 300
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    names = ("miou", "pixel_accuracy", "pixel_loss")
    folder, shards = (
        [{name: record.get(name) for name in names} for record in metrics(tmp_path / output)]
        for output in ("folder", "shards")
    )
    assert shards == folder


def test_damaged_images_and_masks_are_left_out(scenes, tmp_path):
    folder = tmp_path / "scenes"
    make_scene_set(folder, train=24, val=9, side=64)
    masks = folder / "masks"
    (masks / "train" / "00003.png").write_bytes(b"no image")
    Image.new("L", (5, 5)).save(masks / "train" / "00004.png")
    image = folder / "images" / "val" / "00002.jpg"
    image.write_bytes(image.read_bytes()[:200])
    done = start(folder, tmp_path, "--epochs", "1", "--warmup-epochs", "0", ranks=1, start_with="none")
    assert done.returncode == 0, done.stdout
    for text in ("00003.png is not a complete mask", "00004.png has 5 x 5 pixels", "left out: "):
        assert text in done.stdout
    (evaluated,) = [record for record in metrics(tmp_path) if "miou" in record]
    assert (evaluated["images"], evaluated["bad_samples"]) == (8, 1)
    refused = start(folder, tmp_path / "2", "--bad-samples", "fail", ranks=1, start_with="none")
    assert refused.returncode == 2
    assert "Repair or remove it, or skip such samples" in refused.stdout


@pytest.mark.parametrize("mode", ["whole", "slide"])
def test_metrics_do_not_depend_on_ranks_or_order(scenes, tmp_path, mode):
    arguments = (str(scenes), "--test-mode", mode)
    (alone,) = ranks_of("iou", tmp_path / "1", *arguments, ranks=1, start_with="none")
    (other,) = ranks_of("iou", tmp_path / "r", *arguments, "--reversed", ranks=1, start_with="none")
    assert alone["images"] == 9
    assert 0 < alone["miou"] < 50
    assert other == alone
    for rank in ranks_of("iou", tmp_path / "2", *arguments, ranks=2, start_with="gloo"):
        assert rank == alone


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--img-size", "72"), "must be a multiple of 16"),
        (("--resize-range", "2", "1"), "--resize-range takes two numbers above 0"),
        (("--scene-size", "64", "192"), "--scene-size takes the longer side first"),
        (("--num-classes", "5"), "has 7 classes. Drop --num-classes"),
        (("--model", "cait_xxs24_224"), "takes images of one size"),
    ],
)
def test_wrong_settings_are_refused(scenes, tmp_path, flags, message):
    done = start(scenes, tmp_path, *flags, ranks=1, start_with="none")
    assert done.returncode == 2
    assert message in done.stdout
