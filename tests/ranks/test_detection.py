"""Detection end to end: it resumes to the bit, leaves out what is damaged, and counts each image once."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from horovod_volo.demo.scene_set import make_scene_set
from horovod_volo.dense.average_precision import BoxPredictions, measure_boxes
from horovod_volo.dense.box_evaluation import truths_of
from horovod_volo.dense.box_list import find_boxes, list_boxes
from horovod_volo.evaluate import main
from tests.ranks.launching import launcher, python, ranks_of, run, train

SMALL = (
    *("--recipe", "detection_demo", "--img-size", "64", "--epochs", "2", "--warmup-epochs", "0"),
    *("--hue", "18", "--drop-path", "0.2", "--ema-decay", "0.9", "--log-every", "1", "--name", "run"),
)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes") / "set"
    make_scene_set(folder, train=24, val=9, side=64)
    return folder


def start(scenes: Path, output: Path, *arguments: str, **settings: Any) -> Any:
    return train(str(scenes), *SMALL, "--output", str(output), *arguments, **settings)


@pytest.fixture(scope="module")
def whole(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two epochs on two ranks."""
    output = tmp_path_factory.mktemp("whole")
    done = start(scenes, output, ranks=2, start_with="gloo")
    assert done.returncode == 0, done.stdout
    assert "24 training and 9 held-out images with boxes, 6 classes; 372 anchors" in done.stdout
    assert "after epoch 2 of 2: AP " in done.stdout
    return output


def weights(output: Path) -> dict[tuple[str, str], torch.Tensor]:
    folder = output / "run" / "checkpoints" / "last"
    return {
        (file.name, name): tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def metrics(output: Path) -> list[dict[str, Any]]:
    lines = (output / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_stopped_run_resumes_to_the_bit(scenes: Path, whole: Path, tmp_path: Path) -> None:
    stopped = start(scenes, tmp_path, "--stop-at-step", "2", ranks=2, start_with="mpi")
    assert stopped.returncode == 75, stopped.stdout
    resumed = start(scenes, tmp_path, "--resume", "auto", ranks=2, start_with="gloo")
    assert resumed.returncode == 0, resumed.stdout
    expected, found = weights(whole), weights(tmp_path)
    assert len(expected) > 200
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    board = EventAccumulator(str(tmp_path / "run"))
    board.Reload()
    assert board.Tags()["images"] == [f"evaluation/image {number:05}" for number in (0, 2, 4, 6)]
    (*_, picture) = board.Images("evaluation/image 00002")
    with Image.open(io.BytesIO(picture.encoded_image_string)) as shown:
        assert shown.size == (picture.width, picture.height)
    losses = [record for record in metrics(tmp_path) if "box_loss" in record]
    assert [record["step"] for record in losses] == list(range(1, 7))
    assert all(record["box_loss"] > 0 < record["class_loss"] for record in losses)
    evaluated, others = (
        [{name: value for name, value in record.items() if "ap" in name} for record in metrics(each)]
        for each in (whole, tmp_path)
    )
    assert evaluated == others


def test_damaged_images_are_left_out(scenes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scenes"
    make_scene_set(folder, train=24, val=9, side=64)
    (folder / "images" / "train" / "00003.jpg").write_bytes(b"no image")
    Image.new("RGB", (5, 5)).save(folder / "images" / "train" / "00004.jpg")
    image = folder / "images" / "val" / "00002.jpg"
    image.write_bytes(image.read_bytes()[:200])
    done = start(folder, tmp_path, "--epochs", "1", ranks=1, start_with="none")
    assert done.returncode == 0, done.stdout
    for text in ("00003.jpg cannot be decoded: it", "00004.jpg has 5 x 5 pixels", "left out: "):
        assert text in done.stdout
    (evaluated,) = [record for record in metrics(tmp_path) if "ap" in record]
    assert (evaluated["images"], evaluated["bad_samples"]) == (8, 1)


def test_a_rank_without_boxes_trains_on(scenes: Path, tmp_path: Path) -> None:
    """The first image alone has boxes: most steps have a rank without, and some have none at all."""
    folder = tmp_path / "scenes"
    make_scene_set(folder, train=24, val=9, side=64)
    file = folder / "boxes" / "train.json"
    content = json.loads(file.read_text())
    content["annotations"] = [each for each in content["annotations"] if each["image_id"] == 0]
    file.write_text(json.dumps(content))
    flags = ("--keep-empty", "--batch-size", "2", "--epochs", "1")
    done = start(folder, tmp_path, *flags, ranks=2, start_with="gloo")
    assert done.returncode == 0, done.stdout
    losses = [record["loss"] for record in metrics(tmp_path) if "box_loss" in record]
    assert len(losses) == 6
    assert losses.count(0) == 5
    assert np.isfinite(losses).all()
    refused = start(folder, tmp_path / "2", "--batch-size", "2", ranks=1, start_with="none")
    assert refused.returncode == 2
    assert "= 2 images, but there are 1" in refused.stdout  # the others are empty


def test_metrics_do_not_depend_on_ranks_or_order(scenes: Path, tmp_path: Path) -> None:
    (alone,) = ranks_of("boxes", tmp_path / "1", str(scenes), ranks=1, start_with="none")
    (other,) = ranks_of("boxes", tmp_path / "r", str(scenes), "--reversed", ranks=1, start_with="none")
    assert alone["images"] == 9
    assert alone["ap50"] > 0
    assert other == alone
    for rank in ranks_of("boxes", tmp_path / "2", str(scenes), ranks=2, start_with="gloo"):
        assert rank == alone


def test_evaluating_a_run_gives_its_figures_and_cocos_results(
    scenes: Path, whole: Path, tmp_path: Path
) -> None:
    command = (str(scenes), "--weights", str(whole / "run" / "checkpoints" / "last"), "--batch-size", "4")
    flags = ("--predictions", str(tmp_path / "p"), "--json", str(tmp_path / "one.json"), "--per-class", "2")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main([*command, *flags]) == 0
    found = json.loads((tmp_path / "one.json").read_text())
    in_run = [record for record in metrics(whole) if "ap" in record][-1]
    for name in ("ap", "ap50", "ar100", "images"):
        assert found[name] == in_run[name]
    assert f"AP        {found['ap']:.3f} %" in output.getvalue()
    assert len(output.getvalue().rstrip().split("\n\n")[1].splitlines()) == 2
    arguments = [*command, "--json", str(tmp_path / "two.json")]
    done = run([*launcher("gloo", 2), *python(), "-m", "horovod_volo.evaluate", *arguments])
    assert done.returncode == 0, done.stdout
    both = json.loads((tmp_path / "two.json").read_text())
    assert (found.pop("ranks"), both.pop("ranks")) == (1, 2)
    assert both == found
    images = list_boxes(find_boxes(scenes, "val"), None)
    results = json.loads((tmp_path / "p" / "detections_val.json").read_text())
    boxes = np.array([record["bbox"] for record in results])
    boxes[:, 2:] += boxes[:, :2]
    positions = {int(number): index for index, number in enumerate(images.annotations.arrays.image_ids)}
    predictions = BoxPredictions(
        np.array([positions[record["image_id"]] for record in results]),
        boxes,
        np.array([record["category_id"] - 1 for record in results]),
        np.array([record["score"] for record in results]),
    )
    measured = measure_boxes(truths_of(images, np.arange(9)), predictions, 6)
    assert 100 * measured.ap == pytest.approx(found["ap"], abs=1e-6)


def test_weights_for_other_classes_are_refused(
    scenes: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_scene_set(tmp_path / "scenes", train=24, val=9, side=64)
    file = tmp_path / "scenes" / "boxes" / "val.json"
    content = json.loads(file.read_text())
    first, *_, last = content["categories"]
    first["name"], last["name"] = last["name"], first["name"]
    file.write_text(json.dumps(content))
    assert main([str(tmp_path / "scenes"), "--weights", str(whole / "run")]) == 2
    shown = capsys.readouterr().err
    assert f"class 0 is {first['name']} in {tmp_path / 'scenes'}, but {last['name']} in {whole}" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--img-size", "72"), "must be a multiple of 16"),
        (("--crop-sides", "1", "0.5"), "--crop-sides takes two numbers above 0"),
        (("--crop-sides", "0.5", "2"), "--crop-sides must be at most 1"),
        (("--num-classes", "5"), "has 6 classes. Drop --num-classes"),
        (("--model", "lvvit_s"), "lvvit_s cannot be the trunk of SSD"),
        (("--model", "resnet18"), "has no drop path and no --grad-checkpoint"),
    ],
)
def test_wrong_settings_are_refused(
    scenes: Path, tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    done = start(scenes, tmp_path, *flags, ranks=1, start_with="none")
    assert done.returncode == 2
    assert message in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--scales", "0.5", "1"), "--scales is for segmentation, but"),
        (("--real", "real.json"), "--real is for classification, but"),
    ],
)
def test_flags_of_other_tasks_are_refused(
    scenes: Path, whole: Path, flags: tuple[str, ...], message: str
) -> None:
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        assert main([str(scenes), "--weights", str(whole / "run"), *flags]) == 2
    assert message in output.getvalue()
