"""Any number of ranks gives the same per-class accuracy as a simple loop over the images."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import horovod_volo.models.timm_api  # noqa: F401  # torchvision imports only after it

# isort: split
from timm.data import create_transform

from horovod_volo.data.demo.demo_set import make_demo_set
from horovod_volo.evaluate import main
from horovod_volo.models.build import build_model
from tests.ranks.launching import launcher, python, run

IMAGES, SIDE = 23, 32
DONE, MISTAKE = 0, 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Seen(NamedTuple):
    """The result of the simple loop for one image."""

    name: str
    truth: int
    best: list[int]  # five classes
    loss: float


class Ended(NamedTuple):
    """Exit status and output of a run of the command."""

    status: int
    output: str  # of both streams


def evaluated(*arguments: str, ranks: int = 1, start_with: str = "none") -> Ended:
    """Run the command under a launcher, or without one in this process."""
    if start_with == "none":
        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = main(arguments)
        return Ended(status, output.getvalue())
    words = [*python(), "-m", "horovod_volo.evaluate", *arguments]
    done = run([*launcher(start_with, ranks), *words])
    return Ended(done.returncode, done.stdout)


def answer_of(place: Path, data: str, *arguments: str, **how: Any) -> dict[str, Any]:
    """Run the command on several ranks; return its JSON."""
    file = place / "answer.json"
    file.unlink(missing_ok=True)
    flags = ("--batch-size", "4", "--json", str(file), "--catalog-dir", str(place / "catalogs"))
    done = evaluated(str(place / data), "--weights", str(place / f"run_{data}"), *flags, *arguments, **how)
    assert done.status == DONE, done.output
    answer: dict[str, Any] = json.loads(file.read_text())
    return answer


def save_run(folder: Path, classes: int) -> None:
    """Save a network in a run's format, with random weights large enough to distinguish images."""
    torch.manual_seed(classes)
    network = build_model("volo_demo", img_size=SIDE, num_classes=classes, drop_path=0.0)
    with torch.no_grad():
        for head in (network.head, network.aux_head):
            head.weight.normal_()
            head.bias.fill_(0.01)  # with biases of 0 the auxiliary head would count as never trained
    checkpoint = folder / "checkpoints" / "best"
    checkpoint.mkdir(parents=True)
    save_file(network.state_dict(), checkpoint / "model.safetensors")
    (folder / "resolved.toml").write_text(f'[model]\nmodel = "volo_demo"\nimg_size = {SIDE}\n')


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a set of shapes, one with the names of ImageNet, one like ImageNet-V2, and a network for each."""
    folder = tmp_path_factory.mktemp("evaluate")
    make_demo_set(folder / "demo", train=40, val=IMAGES)
    files = sorted((folder / "demo" / "val").rglob("*.jpg"))
    for number, file in enumerate(files, 1):
        named = folder / "named" / "val" / file.parent.name / f"ILSVRC2012_val_{number:08d}.JPEG"
        numbered = folder / "v2" / str(number % 12) / file.name
        for copy in (named, numbered):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    for data, classes in (("demo", 10), ("named", 10), ("v2", 12)):
        save_run(folder / f"run_{data}", classes)
    return folder


def plain_loop(place: Path, data: str, root: str) -> Iterator[Seen]:
    """Show the network one image after the other, as timm does, with classes numbered by hand."""
    transform = create_transform(SIDE, interpolation="bicubic", crop_pct=1.0, mean=MEAN, std=STD)
    network = build_model("volo_demo", img_size=SIDE, num_classes=12 if data == "v2" else 10, drop_path=0.0)
    network.load_state_dict(load_file(place / f"run_{data}/checkpoints/best/model.safetensors"))
    network.eval()
    folders = sorted(path.name for path in (place / data / root).iterdir())
    for file in sorted((place / data / root).rglob("*.[jJ]*")):
        with Image.open(file) as image:
            pixels = transform(image.convert("RGB"))
        with torch.inference_mode():
            logits = network(pixels[None])[0]
        truth = int(file.parent.name) if data == "v2" else folders.index(file.parent.name)
        best = logits.argsort(descending=True)
        assert logits[best[0]] - logits[best[1]] > 0.05, "a rounded pixel could decide: take another seed"
        yield Seen(file.name, truth, best[:5].tolist(), float(logits.logsumexp(0) - logits[truth]))


def assert_agrees(answer: dict[str, Any], images: list[Seen]) -> None:
    assert answer["images"] == len(images)
    assert answer["top1_right"] == sum(image.truth == image.best[0] for image in images)
    assert answer["top5_right"] == sum(image.truth in image.best for image in images)
    assert answer["top1"] == 100 * answer["top1_right"] / len(images)
    assert answer["top5"] == 100 * answer["top5_right"] / len(images)
    assert answer["loss"] == pytest.approx(sum(image.loss for image in images) / len(images), rel=0.01)


def assert_classes_agree(rows: list[dict[str, Any]], names: list[str], images: list[Seen]) -> None:
    assert sorted(row["name"] for row in rows) == sorted(names)
    assert [row["top1"] for row in rows] == sorted(row["top1"] for row in rows)
    for row in rows:
        number = names.index(row["name"])
        own = [image.best[0] for image in images if image.truth == number]
        wrong = [guess for guess in own if guess != number]
        most = max((wrong.count(guess) for guess in wrong), default=0)
        instead = min((guess for guess in wrong if wrong.count(guess) == most), default=None)
        assert (row["images"], row["right"]) == (len(own), own.count(number))
        assert (row["mistaken_for"], row["mistaken"]) == ("" if instead is None else names[instead], most)


@pytest.mark.parametrize(("ranks", "start_with"), [(1, "none"), (2, "gloo"), (3, "mpi")])
def test_any_number_of_ranks_counts_what_a_plain_loop_counts(place, ranks, start_with):
    answer = answer_of(place, "demo", "--per-class", "all", ranks=ranks, start_with=start_with)
    images = list(plain_loop(place, "demo", "val"))
    assert len(images) == IMAGES
    assert 0 < answer["top1_right"] < answer["top5_right"] < IMAGES
    assert_agrees(answer, images)
    names = sorted(path.name for path in (place / "demo" / "val").iterdir())
    assert_classes_agree(answer["classes"], names, images)
    assert answer["weights"] == str(place / "run_demo")
    assert answer["data"] == str(place / "demo" / "val")
    settings = ("model", "img_size", "crop_pct", "precision", "batch_size", "ranks", "bad_samples")
    assert [answer[key] for key in settings] == ["volo_demo", SIDE, 1.0, "fp32", 4, ranks, 0]
    assert (answer["mean"], answer["std"]) == (list(MEAN), list(STD))


def test_two_ranks_score_real_labels(place):
    images = list(plain_loop(place, "named", "val"))
    lists = [[] if n % 5 == 0 else sorted({image.truth, n % 10}) for n, image in enumerate(images)]
    by_number = sorted(range(IMAGES), key=lambda n: images[n].name)
    (place / "real.json").write_text(json.dumps([lists[n] for n in by_number]))
    flags = ("--real", str(place / "real.json"), "--per-class", "3")
    answer = answer_of(place, "named", *flags, ranks=2, start_with="gloo")
    judged = [image.best[0] in found for image, found in zip(images, lists, strict=True) if found]
    assert sum(judged) > sum(image.truth == image.best[0] for image in images), "the lists change nothing"
    assert answer["real"] == {
        "file": str(place / "real.json"),
        "accuracy": 100 * sum(judged) / len(judged),
        "right": sum(judged),
        "images": len(judged),
    }
    assert_agrees(answer, images)
    assert len(answer["classes"]) == 3


def test_two_ranks_number_the_folders_of_v2_as_numbers(place):
    answer = answer_of(place, "v2", "--v2", "--per-class", "all", ranks=2, start_with="gloo")
    images = list(plain_loop(place, "v2", "."))
    assert sum(image.truth == image.best[0] for image in images if image.truth > 1) > 0
    assert_agrees(answer, images)
    assert_classes_agree(answer["classes"], [str(number) for number in range(12)], images)


def test_a_damaged_image_is_named_and_left_out(place):
    damaged = place / "damaged"
    shutil.copytree(place / "demo", damaged, dirs_exist_ok=True)
    shutil.copytree(place / "run_demo", place / "run_damaged", dirs_exist_ok=True)
    images = list(plain_loop(place, "demo", "val"))
    spoilt = sorted((damaged / "val").rglob("*.jpg"))[7]
    spoilt.write_bytes(spoilt.read_bytes()[:300])
    answer = answer_of(place, "damaged", ranks=2, start_with="gloo")
    assert answer["bad_samples"] == 1
    assert_agrees(answer, [image for image in images if image.name != spoilt.name])
    done = evaluated(str(damaged), "--weights", str(place / "run_demo"))
    assert done.output.count("left out: ") == 1
    assert str(spoilt) in done.output
    assert "images    22 of " in done.output


def test_another_size_another_crop_and_sixteen_bits(place):
    usual = answer_of(place, "demo")
    larger = answer_of(place, "demo", "--img-size", "48", "--crop-pct", "0.75")
    assert (larger["img_size"], larger["crop_pct"], larger["images"]) == (48, 0.75, IMAGES)
    assert larger["loss"] != usual["loss"]
    halves = answer_of(place, "demo", "--precision", "bf16")
    assert halves["precision"] == "bf16"
    assert halves["loss"] == pytest.approx(usual["loss"], rel=0.05)
    assert halves["loss"] != usual["loss"], "the precision changed nothing: was it used at all?"


def test_text_and_json_on_the_screen_tell_the_same(place):
    request = (str(place / "demo"), "--weights", str(place / "run_demo"), "--per-class", "2")
    text, screen = evaluated(*request), evaluated(*request, "--json", "-")
    assert text.status == screen.status == DONE, screen.output
    answer = json.loads(screen.output[screen.output.index("{") :])
    assert f"top-1     {answer['top1']:.3f} %, {answer['top1_right']} images" in text.output
    assert f"loss      {answer['loss']:.5f}" in text.output
    assert "top-1 " not in screen.output
    worst = answer["classes"][0]
    row = next(line for line in text.output.splitlines() if line.startswith(worst["name"]))
    assert f"{worst['mistaken_for']} ({worst['mistaken']})" in row


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "the following arguments are required: DATA_DIR, --weights. "),
        ("{demo} --weights {run} --sise 3", "unrecognized arguments: --sise 3. "),
        ("{demo} --weights {run} --per-class none", "takes a whole number of at least 1, not 'none'; or all"),
        ("{demo} --weights {run} --v2 --split val", "argument --split: not allowed with argument --v2"),
        ("{demo} --weights {run}/nowhere --model volo_demo", "There are no weights at "),
        ("{v2} --weights {run} --v2", "has 12 class folders, but the network of"),
        ("{demo} --weights {run} --v2", "With --v2 its class folders must be numbers"),
        ("{demo} --weights {run} --real {run}/resolved.toml", "is not valid JSON"),
        ("{demo} --weights {run} --json {run}/nowhere/a.json", "--json cannot write"),
        ("{demo} --weights {run} --img-size 33", "--img-size must be a multiple of 16"),
        ("{v2} --weights {run}", "has no folder val or validation"),
    ],
)
def test_a_mistake_is_one_line(place, arguments, said):
    found = {"demo": place / "demo", "v2": place / "v2", "run": place / "run_demo"}
    done = evaluated(*arguments.format(**found).split())
    assert done.status == MISTAKE
    assert len(done.output.splitlines()) == 1, done.output
    assert done.output.startswith("error: ")
    assert said in done.output


@pytest.mark.parametrize("flags", ["--weights nowhere.pt --model volo_demo", "--weights w --img-size x"])
def test_two_ranks_say_a_mistake_once(place, flags):
    where = ("--catalog-dir", str(place / "catalogs"))
    done = evaluated(str(place / "demo"), *flags.split(), *where, ranks=2, start_with="mpi")
    assert done.status == MISTAKE, done.output
    assert done.output.count("error: ") == 1
    assert "Traceback" not in done.output
