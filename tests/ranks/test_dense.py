"""Segmentation and detection end to end.

Both resume to the bit, leave out what is damaged, count each pixel or box once on any number of ranks, and
are evaluated with the figures of their training. That the order of images makes no difference is shown in
tests/unit/test_tasks_metrics.py; pixels are counted in whole numbers.
"""

import contextlib
import functools
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from horovod_volo.data.images.split_folder import Split
from horovod_volo.demo.scene_set import make_scene_set
from horovod_volo.dense.average_precision import BoxPredictions, measure_boxes
from horovod_volo.dense.box_evaluation import truths_of
from horovod_volo.dense.box_list import list_boxes
from horovod_volo.dense.mean_iou import count_pixels, iou_metrics
from horovod_volo.dense.pictures import write_prediction
from horovod_volo.dense.scene_list import SceneLayout, SceneList
from horovod_volo.evaluate import main as evaluate
from horovod_volo.pack import main as pack
from horovod_volo.train import main as train
from tests import runs
from tests.ranks.launching import launcher, python, run
from tests.runs import FINISHED, MISTAKE, assert_same_state, records, state, steps

CLASSES = 7


class TaskCase(NamedTuple):
    """What differs between the two tasks."""

    flags: tuple[str, ...]
    banner: str
    result: str
    loss: str
    scores: tuple[str, ...]
    files: str  # of which a run leaves out those that are damaged
    left_out: tuple[str, ...]
    evaluation: tuple[str, ...]


SLIDE = ("--test-mode", "slide", "--test-stride", "48")
SMALL = ("--img-size", "64", "--epochs", "2", "--drop-path", "0.2", "--ema-decay", "0.9", "--log-every", "1")
SEGMENTATION = TaskCase(
    ("--recipe", "segmentation_demo", *SMALL, "--scene-size", "192", "64", "--photometric", *SLIDE),
    "24 training and 9 held-out images with masks, plain layout, 7 classes",
    "mean IoU",
    "pixel_loss",
    ("miou", "pixel_accuracy", "class_accuracy", "images"),
    "masks/train/{}.png",
    ("00003.png is not a complete mask", "00004.png has 5 x 5 pixels", "left out: "),
    ("--scales", "0.75", "1.5", "--flip"),
)
DETECTION = TaskCase(
    ("--recipe", "detection_demo", *SMALL, "--warmup-epochs", "0", "--hue", "18"),
    "24 training and 9 held-out images with boxes, 6 classes; 372 anchors",
    "AP",
    "box_loss",
    ("ap", "ap50", "ar100", "images"),
    "images/train/{}.jpg",
    ("00003.jpg cannot be decoded: it", "00004.jpg has 5 x 5 pixels", "left out: "),
    ("--batch-size", "4"),
)
both_tasks = pytest.mark.parametrize("task", [SEGMENTATION, DETECTION], ids=["segmentation", "detection"])
Whole = Callable[[TaskCase], Path]


def start(task: TaskCase, scenes: Path, output: Path, *flags: str, **settings: Any) -> str:
    return runs.start(scenes, output, *flags, small=task.flags, **settings)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes") / "set"
    make_scene_set(folder, train=24, val=9, side=64)
    return folder


@pytest.fixture
def changed(scenes: Path, tmp_path: Path) -> Path:
    return shutil.copytree(scenes, tmp_path / "scenes")


@pytest.fixture(scope="module")
def whole(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return a function that gives the output of a run of two epochs on two ranks."""

    @functools.cache
    def trained(task: TaskCase) -> Path:
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
    assert found[-1][0] > 0  # something is found


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


def evaluated(scenes: Path, weights: Path, *arguments: str) -> tuple[int, str]:
    """Run the command in this process; return its status and output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = evaluate([str(scenes), "--weights", str(weights), *arguments])
    return status, output.getvalue()


@both_tasks
def test_a_run_on_two_ranks_is_evaluated_with_its_figures(scenes, whole, tmp_path, task):
    weights, predictions = whole(task) / "run" / "checkpoints" / "last", tmp_path / "p"
    flags = ("--predictions", str(predictions), "--json", str(tmp_path / "r.json"), "--per-class", "2")
    status, output = evaluated(scenes, weights, *flags)
    assert status == FINISHED, output
    found, in_run = json.loads((tmp_path / "r.json").read_text()), records(whole(task), task.scores[0])[-1]
    assert [found[name] for name in task.scores] == [in_run[name] for name in task.scores]
    score = found[task.scores[0]]
    assert f"{task.result:<9} {score:.3f} %" in output
    assert len(output.rstrip().split("\n\n")[1].splitlines()) == 2
    recounted = miou_of_files if task is SEGMENTATION else ap_of_file
    assert recounted(scenes, predictions) == pytest.approx(score, abs=1e-6)


@both_tasks
def test_two_ranks_evaluate_as_one(scenes, whole, tmp_path, task):
    """A segmentation with several sizes, whose figures differ from those of one size."""
    arguments = [str(scenes), "--weights", str(whole(task) / "run"), *task.evaluation]
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    assert evaluate([*arguments, "--json", str(files[0])]) == FINISHED
    command = [*launcher("gloo", 2), *python(), "-m", "horovod_volo.evaluate", *arguments]
    done = run([*command, "--json", str(files[1])])
    assert done.returncode == FINISHED, done.stdout
    one, two = (json.loads(file.read_text()) for file in files)
    assert (one.pop("ranks"), two.pop("ranks")) == (1, 2)
    assert two == one
    assert one["images"] == 9
    if task is SEGMENTATION:
        assert one["miou"] != records(whole(task), "miou")[-1]["miou"]
        assert one["scales"] == [0.75, 1.5]


def miou_of_files(scenes: Path, predictions: Path) -> float:
    confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for mask in sorted((scenes / "masks" / "val").glob("*.png")):
        with Image.open(mask) as true, Image.open(predictions / mask.name) as predicted:
            assert predicted.mode == "P"
            pair = [torch.from_numpy(np.array(each)) for each in (true, predicted)]
        confusion += count_pixels(*pair, CLASSES)
    return iou_metrics(confusion.numpy())["miou"]


def ap_of_file(scenes: Path, predictions: Path) -> float:
    images = list_boxes(scenes, "val")
    results = json.loads((predictions / "detections_val.json").read_text())
    boxes = np.array([record["bbox"] for record in results])
    boxes[:, 2:] += boxes[:, :2]
    positions = {int(number): index for index, number in enumerate(images.annotations.image_ids)}
    found = BoxPredictions(
        np.array([positions[record["image_id"]] for record in results]),
        boxes,
        np.array([record["category_id"] - 1 for record in results]),
        np.array([record["score"] for record in results]),
    )
    return 100 * measure_boxes(truths_of(images, np.arange(9)), found, 6)[0]["ap"]


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
        (SEGMENTATION, "--model resnet18", "Use a --model of VOLO or LV-ViT"),
        (DETECTION, "--img-size 72", "must be a multiple of 16"),
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
        (DETECTION, "--predictions /proc/nowhere", "--predictions cannot write into /proc/nowhere"),
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
    layout = SceneLayout("ade20k", ("a", "b"), True, "images", "annotations", splits)
    names = ("deep/ADE_val_00000001.jpg",)
    write_prediction(tmp_path, SceneList(tmp_path, layout, "val", names), 0, torch.tensor([[0, 1], [1, 1]]))
    with Image.open(tmp_path / "deep" / "ADE_val_00000001.png") as image:
        assert np.array(image).tolist() == [[1, 2], [2, 2]]
