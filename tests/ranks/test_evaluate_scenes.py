"""Evaluating a segmentation run gives the run's figures on any number of ranks, and its predictions."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from horovod_volo.data.images.split_folder import Split
from horovod_volo.demo.scene_set import make_scene_set
from horovod_volo.dense.mean_iou import count_pixels, iou_metrics
from horovod_volo.dense.pictures import write_prediction
from horovod_volo.dense.scene_list import SceneLayout, SceneList
from horovod_volo.evaluate import main
from tests.ranks.launching import launcher, python, run, train

CLASSES = 7


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scenes") / "set"
    make_scene_set(folder, train=16, val=7, side=64)
    return folder


@pytest.fixture(scope="module")
def trained(scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    small = [
        "--recipe",
        "segmentation_demo",
        "--img-size",
        "64",
        "--scene-size",
        "192",
        "64",
        "--epochs",
        "2",
    ]
    done = train(str(scenes), *small, "--output", str(folder), "--name", "run", ranks=1, start_with="none")
    assert done.returncode == 0, done.stdout
    return folder / "run"


def evaluated(scenes: Path, trained: Path, *arguments: str) -> tuple[int, str]:
    """Run the command in this process; return its status and output."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = main([str(scenes), "--weights", str(trained), *arguments])
    return status, output.getvalue()


def record(scenes: Path, trained: Path, *arguments: str) -> dict[str, Any]:
    status, output = evaluated(scenes, trained, *arguments, "--json", "-")
    assert status == 0, output
    result: dict[str, Any] = json.loads(output[output.index("{\n") :])
    return result


def test_figures_and_predictions_are_the_runs(scenes: Path, trained: Path, tmp_path: Path) -> None:
    flags = ("--predictions", str(tmp_path / "p"), "--json", str(tmp_path / "r.json"), "--per-class", "2")
    status, output = evaluated(scenes, trained, *flags)
    assert status == 0, output
    found = json.loads((tmp_path / "r.json").read_text())
    in_run = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()][-1]
    for name in ("miou", "pixel_accuracy", "class_accuracy", "images"):
        assert found[name] == in_run[name]
    assert f"mean IoU  {found['miou']:.3f} %" in output
    assert len(output.rstrip().split("\n\n")[1].splitlines()) == 2
    confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for mask in sorted((scenes / "masks" / "val").glob("*.png")):
        with Image.open(mask) as true, Image.open(tmp_path / "p" / mask.name) as predicted:
            assert predicted.mode == "P"
            pair = [torch.from_numpy(np.array(each)) for each in (true, predicted)]
        confusion += count_pixels(*pair, CLASSES)
    assert iou_metrics(confusion.numpy())["miou"] == pytest.approx(found["miou"], abs=1e-9)


def test_several_sizes_on_two_ranks(scenes: Path, trained: Path, tmp_path: Path) -> None:
    flags = ("--scales", "0.75", "1.5", "--flip", "--test-mode", "slide")
    alone = record(scenes, trained, *flags)
    arguments = [*python(), "-m", "horovod_volo.evaluate", str(scenes), "--weights", str(trained), *flags]
    done = run([*launcher("gloo", 2), *arguments, "--json", str(tmp_path / "two.json")])
    assert done.returncode == 0, done.stdout
    both = json.loads((tmp_path / "two.json").read_text())
    assert (alone.pop("ranks"), both.pop("ranks")) == (1, 2)
    assert both == alone
    assert alone["miou"] != record(scenes, trained)["miou"]
    assert alone["scales"] == [0.75, 1.5]


def test_weights_for_other_classes_are_refused(scenes: Path, trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "scenes"
    shutil.copytree(scenes, folder)
    (folder / "classes.txt").write_text("\n".join("abcdefghi"))
    status, output = evaluated(folder, trained)
    assert status == 2
    assert "has 9 classes, but " in output
    first, second, *others = (scenes / "classes.txt").read_text().splitlines()
    (folder / "classes.txt").write_text("\n".join([second, first, *others]))
    status, output = evaluated(folder, trained)
    assert status == 2
    assert f"class 0 is {second} in {folder}, but {first} in {trained}" in output


def test_ade20ks_server_counts_from_one(tmp_path: Path) -> None:
    splits: dict[Split, str] = {"train": "training", "val": "validation"}
    layout = SceneLayout("ade20k", ("a", "b"), True, "images/{split}", "annotations/{split}", splits)
    names = ("deep/ADE_val_00000001.jpg",)
    write_prediction(tmp_path, SceneList(tmp_path, layout, "val", names), 0, torch.tensor([[0, 1], [1, 1]]))
    with Image.open(tmp_path / "deep" / "ADE_val_00000001.png") as image:
        assert np.array(image).tolist() == [[1, 2], [2, 2]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--scales", "0"), "--scales takes factors above 0"),
        (("--predictions", "/proc/nowhere"), "--predictions cannot create /proc/nowhere"),
        (("--split", "test"), "--split takes train or val"),
    ],
)
def test_mistakes(scenes: Path, trained: Path, flags: tuple[str, ...], message: str) -> None:
    status, output = evaluated(scenes, trained, *flags)
    assert status == 2
    assert message in output
