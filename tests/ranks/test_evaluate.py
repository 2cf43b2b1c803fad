"""Any number of ranks gives the same per-class accuracy as a simple loop over the images."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import horovod_volo.models.timm_api  # noqa: F401  # torchvision imports only after it

# isort: split
from timm.data import create_transform

from horovod_volo.evaluate import main
from horovod_volo.models.build import build_model
from tests.ranks.launching import launcher, python, run

IMAGES, SIDE = 23, 32
DONE, MISTAKE = 0, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImagePrediction(NamedTuple):
    name: str
    truth: int
    best: list[int]  # five classes
    loss: float


def evaluated(*arguments: str, ranks: int = 1, start_with: str = "none") -> tuple[int, str]:
    """Run the command under a launcher, or without one in this process; return its status and output."""
    if start_with == "none":
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return main(arguments), output.getvalue()
    done = run([*launcher(start_with, ranks), *python(), "-m", "horovod_volo.evaluate", *arguments])
    return done.returncode, done.stdout


def result_of(folder: Path, data: str, *arguments: str, **how: Any) -> dict[str, Any]:
    """Run the command, which must succeed; return its JSON."""
    file = folder / "result.json"
    file.unlink(missing_ok=True)
    flags = ("--batch-size", "4", "--json", str(file), "--catalog-dir", str(folder / "catalogs"))
    weights = ("--weights", str(folder / "run"))
    status, output = evaluated(str(folder / data), *weights, *flags, *arguments, **how)
    assert status == DONE, output
    return json.loads(file.read_text())


def save_run(folder: Path) -> None:
    """Save a network in a run's format, with random weights large enough to distinguish images."""
    torch.manual_seed(12)
    network = build_model("volo_demo", img_size=SIDE, num_classes=10, drop_path=0.0)
    with torch.no_grad():
        for head in (network.head, network.aux_head):
            head.weight.normal_()
            head.bias.fill_(0.01)  # with biases of 0 the auxiliary head would be taken for untrained
    checkpoint = folder / "checkpoints" / "best"
    checkpoint.mkdir(parents=True)
    save_file(network.state_dict(), checkpoint / "model.safetensors")
    (folder / "resolved.toml").write_text(f'[model]\nmodel = "volo_demo"\nimg_size = {SIDE}\n')


@pytest.fixture(scope="module")
def folder(demo_images: Callable[[int, int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy a demo set, make copies named like ImageNet and laid out like ImageNet-V2, and a network."""
    folder = tmp_path_factory.mktemp("evaluate")
    shutil.copytree(demo_images(40, IMAGES), folder / "demo")
    files = sorted((folder / "demo" / "val").rglob("*.jpg"))
    for number, file in enumerate(files, 1):
        named = folder / "named" / "val" / file.parent.name / f"ILSVRC2012_val_{number:08d}.JPEG"
        numbered = folder / "v2" / str(number % 12) / file.name
        for copy in (named, numbered):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    save_run(folder / "run")
    return folder


def simple_loop(folder: Path, data: str) -> Iterator[ImagePrediction]:
    """Evaluate image by image with timm's transform, with classes numbered here."""
    transform = create_transform(SIDE, interpolation="bicubic", crop_pct=0.96, mean=MEAN, std=STD)
    network = build_model("volo_demo", img_size=SIDE, num_classes=10, drop_path=0.0)
    network.load_state_dict(load_file(folder / "run/checkpoints/best/model.safetensors"))
    network.eval()
    folders = sorted(path.name for path in (folder / data / "val").iterdir())
    for file in sorted((folder / data / "val").rglob("*.[jJ]*")):
        with Image.open(file) as image:
            pixels = transform(image.convert("RGB"))
        with torch.inference_mode():
            logits = network(pixels[None])[0]
        truth = folders.index(file.parent.name)
        best = logits.argsort(descending=True)
        assert logits[best[0]] - logits[best[1]] > 0.05, (
            "rounding could change the prediction: use another seed"
        )
        yield ImagePrediction(file.name, truth, best[:5].tolist(), float(logits.logsumexp(0) - logits[truth]))


def assert_agrees(result: dict[str, Any], images: list[ImagePrediction]) -> None:
    assert result["images"] == len(images)
    assert result["top1_right"] == sum(image.truth == image.best[0] for image in images)
    assert result["top5_right"] == sum(image.truth in image.best for image in images)
    assert result["top1"] == 100 * result["top1_right"] / len(images)
    assert result["top5"] == 100 * result["top5_right"] / len(images)
    assert result["loss"] == pytest.approx(sum(image.loss for image in images) / len(images), rel=0.01)


def test_any_number_of_ranks_counts_as_a_simple_loop(folder):
    """tests/unit/test_evaluation.py compares the results of each class with a simple loop."""
    one = result_of(folder, "demo", "--per-class", "all")
    three = result_of(folder, "demo", "--per-class", "all", ranks=3, start_with="mpi")
    images = list(simple_loop(folder, "demo"))
    assert len(images) == IMAGES
    assert 0 < one["top1_right"] < one["top5_right"] < IMAGES
    assert_agrees(one, images)
    assert sum(row["images"] for row in one["classes"]) == IMAGES
    assert (one.pop("ranks"), three.pop("ranks")) == (1, 3)
    assert three.pop("loss") == pytest.approx(one.pop("loss"), rel=1e-5)
    assert three == one
    assert one["weights"] == str(folder / "run")
    assert one["data"] == str(folder / "demo" / "val")
    settings = ("model", "img_size", "crop_pct", "precision", "batch_size", "bad_samples")
    assert [one[key] for key in settings] == ["volo_demo", SIDE, 0.96, "fp32", 4, 0]
    assert (one["mean"], one["std"]) == (list(MEAN), list(STD))


def test_two_ranks_score_real_labels(folder):
    images = list(simple_loop(folder, "named"))
    lists = [[] if n % 5 == 0 else sorted({image.truth, n % 10}) for n, image in enumerate(images)]
    by_number = sorted(range(IMAGES), key=lambda n: images[n].name)
    (folder / "real.json").write_text(json.dumps([lists[n] for n in by_number]))
    flags = ("--real", str(folder / "real.json"), "--per-class", "3")
    result = result_of(folder, "named", *flags, ranks=2, start_with="gloo")
    is_right = [image.best[0] in found for image, found in zip(images, lists, strict=True) if found]
    assert sum(is_right) > sum(image.truth == image.best[0] for image in images), (
        "the lists make no difference"
    )
    assert result["real"] == {
        "file": str(folder / "real.json"),
        "accuracy": 100 * sum(is_right) / len(is_right),
        "right": sum(is_right),
        "images": len(is_right),
    }
    assert_agrees(result, images)
    assert len(result["classes"]) == 3


def test_a_damaged_image_is_reported_and_left_out(folder):
    damaged = folder / "damaged"
    shutil.copytree(folder / "demo", damaged, dirs_exist_ok=True)
    images = list(simple_loop(folder, "demo"))
    damaged_image = sorted((damaged / "val").rglob("*.jpg"))[7]
    damaged_image.write_bytes(damaged_image.read_bytes()[:300])
    result = result_of(folder, "damaged", ranks=2, start_with="gloo")
    assert result["bad_samples"] == 1
    assert_agrees(result, [image for image in images if image.name != damaged_image.name])
    _, output = evaluated(str(damaged), "--weights", str(folder / "run"))
    assert output.count("left out: ") == 1
    assert str(damaged_image) in output
    assert "images    22 of " in output


def test_another_size_another_crop_and_bf16(folder):
    usual = result_of(folder, "demo")
    larger = result_of(folder, "demo", "--img-size", "48", "--crop-pct", "0.75")
    assert (larger["img_size"], larger["crop_pct"], larger["images"]) == (48, 0.75, IMAGES)
    assert larger["loss"] != usual["loss"]
    bf16 = result_of(folder, "demo", "--precision", "bf16")
    assert bf16["precision"] == "bf16"
    assert bf16["loss"] == pytest.approx(usual["loss"], rel=0.05)
    assert bf16["loss"] != usual["loss"], "the loss is that of fp32: bf16 was not used"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{demo} --weights {run}/nowhere --model volo_demo", "There are no weights at "),
        ("{v2} --weights {run} --v2", "has 12 class folders, but the network of"),
        ("{demo} --weights {run} --json {run}/nowhere/a.json", "--json cannot write"),
        ("{demo} --weights {run} --img-size 33", "--img-size must be a multiple of 16"),
        ("{v2} --weights {run}", "has no folder val or validation or valid"),
    ],
)
def test_a_mistake_is_one_line(folder, arguments, message):
    folders = {"demo": folder / "demo", "v2": folder / "v2", "run": folder / "run"}
    status, output = evaluated(*arguments.format(**folders).split())
    assert status == MISTAKE
    assert len(output.splitlines()) == 1, output
    assert output.startswith("error: ")
    assert message in output
