"""Segmentation and detection end to end.

Both resume to the bit, leave out what is damaged, count each pixel or box once on any number of ranks, and
are evaluated with the figures of their training.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.config.dense_settings import Detection, Segmentation
from horovod_volo.data.images.split_folder import Split
from horovod_volo.data.pipeline import IMAGENET_NORMALIZATION
from horovod_volo.demo.scene_set import make_scene_set
from horovod_volo.dense.average_precision import BoxPredictions, measure_boxes
from horovod_volo.dense.box_evaluation import BoxEvaluation, truths_of
from horovod_volo.dense.box_list import find_boxes, list_boxes
from horovod_volo.dense.mean_iou import SceneEvaluation, count_pixels, iou_metrics
from horovod_volo.dense.pictures import EvaluationPictures, write_prediction
from horovod_volo.dense.scene_list import SceneLayout, SceneList, find_layout, list_scenes
from horovod_volo.dense.ssd import build_ssd
from horovod_volo.dense.task import RankContext
from horovod_volo.dense.upernet import UperNet
from horovod_volo.evaluate import main as evaluate
from horovod_volo.models.precision import autocast
from horovod_volo.pack import main as pack
from horovod_volo.train import main as train
from tests import runs
from tests.ranks.launching import alone, launcher, on_ranks, python, run
from tests.runs import FINISHED, MISTAKE, assert_same_state, records, state, steps

CPU = torch.device("cpu")
CLASSES = 7


class DenseTask(NamedTuple):
    """What differs between the two tasks."""

    flags: tuple[str, ...]
    banner: str
    result: str
    loss: str
    scores: tuple[str, ...]
    files: str  # of which a run leaves out those that are damaged
    left_out: tuple[str, ...]


SMALL = ("--img-size", "64", "--epochs", "2", "--drop-path", "0.2", "--ema-decay", "0.9", "--log-every", "1")
SEGMENTATION = DenseTask(
    ("--recipe", "segmentation_demo", *SMALL, "--scene-size", "192", "64", "--photometric"),
    "24 training and 9 held-out images with masks, plain layout, 7 classes",
    "mean IoU",
    "pixel_loss",
    ("miou", "pixel_accuracy", "class_accuracy", "images"),
    "masks/train/{}.png",
    ("00003.png is not a complete mask", "00004.png has 5 x 5 pixels", "left out: "),
)
DETECTION = DenseTask(
    ("--recipe", "detection_demo", *SMALL, "--warmup-epochs", "0", "--hue", "18"),
    "24 training and 9 held-out images with boxes, 6 classes; 372 anchors",
    "AP",
    "box_loss",
    ("ap", "ap50", "ar100", "images"),
    "images/train/{}.jpg",
    ("00003.jpg cannot be decoded: it", "00004.jpg has 5 x 5 pixels", "left out: "),
)
both_tasks = pytest.mark.parametrize("task", [SEGMENTATION, DETECTION], ids=["segmentation", "detection"])
Whole = Callable[[DenseTask], Path]


def start(task: DenseTask, scenes: Path, output: Path, *flags: str, **settings: Any) -> str:
    return runs.start(scenes, output, *flags, small=task.flags, **settings)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes") / "set"
    make_scene_set(folder, train=24, val=9, side=64)
    return folder


@pytest.fixture
def changed(scenes: Path, tmp_path: Path) -> Path:
    """Return a copy of the scenes, which a test changes."""
    return shutil.copytree(scenes, tmp_path / "scenes")


@pytest.fixture(scope="module")
def whole(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return a function that gives the output of a run of two epochs on two ranks."""

    @functools.cache
    def trained(task: DenseTask) -> Path:
        output = tmp_path_factory.mktemp("whole")
        shown = start(task, scenes, output)
        assert task.banner in shown
        assert f"after epoch 2 of 2: {task.result} " in shown
        return output

    return trained


@both_tasks
def test_a_stopped_run_resumes_to_the_bit(scenes, whole, tmp_path, task):
    """A segmentation goes on with the same scenes in shards."""
    start(task, scenes, tmp_path, start_with="mpi", stop_at=2)
    if task is SEGMENTATION:
        assert pack([str(scenes), str(tmp_path / "packed"), "--shard-images", "7"]) == 0
        scenes = tmp_path / "packed"
    assert task.banner in start(task, scenes, tmp_path, "--resume", "auto")
    assert_same_state(whole(task), tmp_path)
    assert len(state(tmp_path)) > 200
    # Here, because ranks import this module, too.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "run"))
    board.Reload()
    assert board.Tags()["images"] == [f"evaluation/image {number:05}" for number in (0, 2, 4, 6)]
    (*_, picture) = board.Images("evaluation/image 00002")
    with Image.open(io.BytesIO(picture.encoded_image_string)) as shown:
        assert shown.size == (picture.width, picture.height)
    assert steps(tmp_path, task.loss) == list(range(1, 7))
    assert all(record[task.loss] > 0 for record in records(tmp_path, task.loss))
    found, expected = (
        [[record[name] for name in task.scores] for record in records(output, task.scores[0])]
        for output in (tmp_path, whole(task))
    )
    assert found == expected


@both_tasks
def test_damaged_files_are_left_out(changed, tmp_path, task):
    (changed / task.files.format("00003")).write_bytes(b"no image")
    Image.new("L" if task is SEGMENTATION else "RGB", (5, 5)).save(changed / task.files.format("00004"))
    image = changed / "images" / "val" / "00002.jpg"
    image.write_bytes(image.read_bytes()[:200])
    flags = ("--epochs", "1", "--warmup-epochs", "0")
    shown = start(task, changed, tmp_path, *flags, ranks=1)
    assert all(text in shown for text in task.left_out)
    (evaluated,) = records(tmp_path, task.scores[0])
    assert (evaluated["images"], evaluated["bad_samples"]) == (8, 1)
    if task is SEGMENTATION:
        shown = start(task, changed, tmp_path / "2", "--bad-samples", "fail", ranks=1, status=MISTAKE)
        assert "Repair or remove it, or skip such samples" in shown


def test_a_rank_without_boxes_trains_on(changed, tmp_path):
    """The first image alone has boxes: most steps have a rank without, and some have none at all."""
    file = changed / "boxes" / "train.json"
    content = json.loads(file.read_text())
    content["annotations"] = [each for each in content["annotations"] if each["image_id"] == 0]
    file.write_text(json.dumps(content))
    start(DETECTION, changed, tmp_path, "--keep-empty", "--batch-size", "2", "--epochs", "1")
    losses = [record["loss"] for record in records(tmp_path, "box_loss")]
    assert len(losses) == 6
    assert losses.count(0) == 5
    assert np.isfinite(losses).all()
    refused = start(DETECTION, changed, tmp_path / "2", "--batch-size", "2", ranks=1, status=MISTAKE)
    assert "= 2 images, but there are 1" in refused  # the others are empty


def box_metrics(world: World, *, scenes: Path, reverse: bool = False) -> dict[str, float]:
    """Measure a fixed detector on this rank's part of the held-out images."""
    images = list_boxes(find_boxes(scenes, "val"), None)
    if reverse:
        images = replace(images, numbers=images.numbers[::-1].copy())
    torch.manual_seed(0)
    network = build_ssd("volo_demo", len(images.classes), img_size=96).eval()
    # Fresh weights find boxes everywhere, some of them right.
    evaluation = BoxEvaluation(images, Data(batch_size=4), Detection(min_score=0.1), 96, context_of(world))
    with closing(evaluation):
        return evaluation.measure(network, lambda images: None, pictures=EvaluationPictures(2)).metrics


def pixel_metrics(world: World, *, scenes: Path, mode: str, reverse: bool = False) -> dict[str, float]:
    """Measure a fixed segmentation network likewise."""
    listed = list_scenes(scenes, find_layout(scenes), "val")
    if reverse:
        listed = replace(listed, names=listed.names[::-1])
    torch.manual_seed(0)
    sizes = {"img_size": 64, "num_classes": CLASSES, "width": 16, "auxiliary_width": 16}
    network = UperNet("volo_demo", drop_path=0.0, neck="lvvit", **sizes).eval()
    settings = Segmentation(scene_size=(192.0, 64.0), test_mode=mode, test_stride=43)
    with closing(SceneEvaluation(listed, Data(batch_size=4), settings, 64, context_of(world))) as evaluation:
        return evaluation.measure(network, lambda images: None, pictures=EvaluationPictures(2)).metrics


def context_of(world: World) -> RankContext:
    return RankContext(world, CPU, 2, IMAGENET_NORMALIZATION, autocast("fp32", CPU))


def test_metrics_do_not_depend_on_ranks_or_order(scenes, tmp_path):
    modes = [partial(pixel_metrics, scenes=scenes, mode=mode) for mode in ("whole", "slide")]
    calls = (partial(box_metrics, scenes=scenes), *modes)
    for call, on_both in zip(calls, on_ranks(tmp_path, *calls), strict=True):
        by_one = alone(call)
        assert by_one["images"] == 9
        assert 0 < by_one.get("miou", by_one.get("ap50")) < 50
        assert [alone(partial(call, reverse=True)), *on_both] == [by_one] * 3


def evaluated(scenes: Path, weights: Path, *arguments: str) -> tuple[int, str]:
    """Run the command in this process; return its status and output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = evaluate([str(scenes), "--weights", str(weights), *arguments])
    return status, output.getvalue()


@both_tasks
def test_two_ranks_evaluate_a_run_as_one_rank_and_as_the_run_did(scenes, whole, tmp_path, task):
    """A segmentation also with several sizes, whose figures differ from those of one size."""
    last, predictions = whole(task) / "run" / "checkpoints" / "last", tmp_path / "p"
    files = {ranks: tmp_path / f"{ranks}.json" for ranks in (1, 2)}
    status, output = evaluated(scenes, last, "--json", str(files[1]), "--per-class", "2")
    assert status == FINISHED, output
    command = [
        *launcher("gloo", 2),
        *python(),
        "-m",
        "horovod_volo.evaluate",
        str(scenes),
        "--weights",
        str(last),
    ]
    done = run([*command, "--predictions", str(predictions), "--json", str(files[2]), "--per-class", "2"])
    assert done.returncode == FINISHED, done.stdout
    one, two = (json.loads(file.read_text()) for file in files.values())
    assert (one.pop("ranks"), two.pop("ranks")) == (1, 2)
    assert two == one
    in_run, score = records(whole(task), task.scores[0])[-1], one[task.scores[0]]
    assert [one[name] for name in task.scores] == [in_run[name] for name in task.scores]
    assert f"{task.result:<9} {score:.3f} %" in output
    assert len(output.rstrip().split("\n\n")[1].splitlines()) == 2
    recounted = miou_of_files if task is SEGMENTATION else ap_of_file
    assert recounted(scenes, predictions) == pytest.approx(score, abs=1e-6)
    if task is SEGMENTATION:
        flags = ("--scales", "0.75", "1.5", "--flip", "--test-mode", "slide")
        assert evaluated(scenes, last, *flags, "--json", str(files[1]))[0] == FINISHED
        several = json.loads(files[1].read_text())
        assert several["miou"] != score
        assert several["scales"] == [0.75, 1.5]


def miou_of_files(scenes: Path, predictions: Path) -> float:
    """Return the mean IoU of the predicted masks in a folder."""
    confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for mask in sorted((scenes / "masks" / "val").glob("*.png")):
        with Image.open(mask) as true, Image.open(predictions / mask.name) as predicted:
            assert predicted.mode == "P"
            pair = [torch.from_numpy(np.array(each)) for each in (true, predicted)]
        confusion += count_pixels(*pair, CLASSES)
    return iou_metrics(confusion.numpy())["miou"]


def ap_of_file(scenes: Path, predictions: Path) -> float:
    """Return the average precision of the predicted boxes in COCO's format."""
    images = list_boxes(find_boxes(scenes, "val"), None)
    results = json.loads((predictions / "detections_val.json").read_text())
    boxes = np.array([record["bbox"] for record in results])
    boxes[:, 2:] += boxes[:, :2]
    positions = {int(number): index for index, number in enumerate(images.annotations.arrays.image_ids)}
    found = BoxPredictions(
        np.array([positions[record["image_id"]] for record in results]),
        boxes,
        np.array([record["category_id"] - 1 for record in results]),
        np.array([record["score"] for record in results]),
    )
    return 100 * measure_boxes(truths_of(images, np.arange(9)), found, 6).ap


@both_tasks
def test_weights_for_other_classes_are_refused(changed, whole, task):
    if task is SEGMENTATION:
        file = changed / "classes.txt"
        first, second, *others = file.read_text().splitlines()
        file.write_text("\n".join("abcdefghi"))
        status, output = evaluated(changed, whole(task) / "run")
        assert status == MISTAKE
        assert "has 9 classes, but " in output
        file.write_text("\n".join([second, first, *others]))
    else:
        file = changed / "boxes" / "val.json"
        content = json.loads(file.read_text())
        one, *_, other = content["categories"]
        first, second = one["name"], other["name"]
        one["name"], other["name"] = second, first
        file.write_text(json.dumps(content))
    status, output = evaluated(changed, whole(task) / "run")
    assert status == MISTAKE
    assert f"class 0 is {second} in {changed}, but {first} in {whole(task)}" in output


@pytest.mark.parametrize(
    ("task", "flags", "message"),
    [
        (SEGMENTATION, "--img-size 72", "must be a multiple of 16"),
        (SEGMENTATION, "--resize-range 2 1", "--resize-range takes two numbers above 0"),
        (SEGMENTATION, "--scene-size 64 192", "--scene-size takes the longer side first"),
        (SEGMENTATION, "--num-classes 5", "has 7 classes. Drop --num-classes"),
        (SEGMENTATION, "--model cait_xxs24_224", "takes images of one size"),
        (DETECTION, "--img-size 72", "must be a multiple of 16"),
        (DETECTION, "--crop-sides 1 0.5", "--crop-sides takes two numbers above 0"),
        (DETECTION, "--crop-sides 0.5 2", "--crop-sides must be at most 1"),
        (DETECTION, "--num-classes 5", "has 6 classes. Drop --num-classes"),
        (DETECTION, "--model lvvit_s", "lvvit_s cannot be the trunk of SSD"),
        (DETECTION, "--model resnet18", "has no drop path and no --grad-checkpoint"),
    ],
)
def test_wrong_settings_are_refused(scenes, tmp_path, capfd, task, flags, message):
    assert train([str(scenes), *task.flags, "--output", str(tmp_path), *flags.split()]) == MISTAKE
    assert message in capfd.readouterr().err


@pytest.mark.parametrize(
    ("task", "flags", "message"),
    [
        (SEGMENTATION, "--scales 0", "--scales takes factors above 0"),
        (SEGMENTATION, "--predictions /proc/nowhere", "--predictions cannot create /proc/nowhere"),
        (SEGMENTATION, "--split test", "--split takes train or val"),
        (DETECTION, "--scales 0.5 1", "--scales is for segmentation, but"),
        (DETECTION, "--real real.json", "--real is for classification, but"),
    ],
)
def test_wrong_flags_of_an_evaluation_are_refused(scenes, whole, task, flags, message):
    status, output = evaluated(scenes, whole(task) / "run", *flags.split())
    assert status == MISTAKE
    assert message in output


def test_ade20ks_server_counts_from_one(tmp_path):
    splits: dict[Split, str] = {"train": "training", "val": "validation"}
    layout = SceneLayout("ade20k", ("a", "b"), True, "images/{split}", "annotations/{split}", splits)
    names = ("deep/ADE_val_00000001.jpg",)
    write_prediction(tmp_path, SceneList(tmp_path, layout, "val", names), 0, torch.tensor([[0, 1], [1, 1]]))
    with Image.open(tmp_path / "deep" / "ADE_val_00000001.png") as image:
        assert np.array(image).tolist() == [[1, 2], [2, 2]]
