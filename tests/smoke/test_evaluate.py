"""evaluate gives the accuracies of training and of timm, and predict the classes of an evaluation."""

import csv
import io
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants as hub
from PIL import Image

import horovod_volo.models.timm_api  # noqa: F401  # torchvision imports only after it

# isort: split
import timm
from timm.data import create_transform, resolve_model_data_config

from horovod_volo import evaluate, predict
from horovod_volo.models.weights_header import read_class_names
from tests.ranks.launching import python, run
from tests.runs import records, start
from tests.smoke.conftest import HELD_OUT_IMAGES, publish, save_run

TIMMS = "test_vit.r160_in1k"  # the smallest timm model whose mean and std are not ImageNet's
CLASSES, RIGHT = 1000, 40


def evaluated(data: Path, weights: object, *flags: str) -> dict[str, Any]:
    file = data.parent / "result.json"
    assert evaluate.main([str(data), "--weights", str(weights), "--json", str(file), *flags]) == 0
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def trained(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run folder of a short training with averaged weights."""
    output = tmp_path_factory.mktemp("trained")
    start(images, output, "--epochs", "2", "--ema-decay", "0.9")
    return output / "run"


def test_the_accuracies_are_those_of_the_training(trained: Path, images: Path) -> None:
    trained_scores = records(trained.parent, "top1")[-1]
    last = trained / "checkpoints" / "last"
    for weights, prefix in ((last, ""), (last / "ema.safetensors", "ema_")):
        result = evaluated(images, weights, "-b", "8")
        for name in ("top1", "top5"):
            assert result[name] == trained_scores[prefix + name]
        assert result["loss"] == pytest.approx(trained_scores[f"{prefix}loss"], rel=1e-6)
        assert all(result[name] == trained_scores[name] for name in ("images", "bad_samples"))
        assert (result["model"], result["img_size"]) == ("volo_demo", 32)
    assert trained_scores["loss"] != trained_scores["ema_loss"], "both are the same weights"
    folders = tuple(sorted(path.name for path in (images / "val").iterdir()))
    assert read_class_names(str(last)) == read_class_names(str(last / "ema.safetensors")) == folders


def test_classes_are_found_by_their_names(trained, images, tmp_path, capsys):
    """Without the first class, the others keep their numbers; a class of another name is refused."""
    whole = evaluated(images, trained, "--per-class", "all")
    shutil.copytree(images / "val", tmp_path / "some" / "val")
    first = min((tmp_path / "some" / "val").iterdir())
    left_out = len(list(first.iterdir()))
    shutil.rmtree(first)
    some = evaluated(tmp_path / "some", trained, "--per-class", "all")
    assert some["images"] == whole["images"] - left_out
    found, expected = (
        {row["name"]: row["right"] for row in each["classes"] if row["name"] != first.name}
        for each in (some, whole)
    )
    assert found == expected
    (tmp_path / "some" / "val" / max(found)).rename(tmp_path / "some" / "val" / "zebra")
    assert evaluate.main([str(tmp_path / "some"), "--weights", str(trained)]) == 2
    assert "was not trained on: zebra" in capsys.readouterr().err


def draw_image(number: int) -> Image.Image:
    """Draw random colours in a square of the size to which the model's images are resized."""
    colours = np.random.default_rng(number).integers(0, 256, size=(7, 7, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((168, 168), Image.Resampling.NEAREST)


@torch.inference_mode()
def logits_of(network: torch.nn.Module, images: list[Image.Image], **colours: Any) -> torch.Tensor:
    """Return a model's logits (images, classes) with timm's own transform."""
    transform = create_transform(**resolve_model_data_config(network) | colours)
    pixels = torch.stack([transform(image) for image in images])  # (images, 3, side, side)
    return torch.cat([network(some) for some in pixels.split(40)])


def test_a_network_of_timm_is_evaluated_as_by_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = timm.create_model(TIMMS).eval()
    with torch.no_grad():
        network.head.weight.normal_()  # otherwise it predicts one class for all images
    publish(tmp_path / "cache", TIMMS, network.state_dict())
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    images = [draw_image(number) for number in range(RIGHT + CLASSES)]
    logits = logits_of(network, images)
    best = logits.argmax(dim=1).tolist()
    truths = [*best[:RIGHT], *range(CLASSES)]
    for number, (image, truth) in enumerate(zip(images, truths, strict=True)):
        folder = tmp_path / "set" / "val" / f"{truth:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number}.png")
    result = evaluated(tmp_path / "set", f"timm:{TIMMS}", "--per-class", "all")
    assert (result["model"], result["img_size"], result["crop_pct"]) == (TIMMS, 160, 0.95)
    assert result["mean"] == result["std"] == [0.5, 0.5, 0.5]
    assert result["top1_right"] == sum(map(int.__eq__, best, truths)) >= RIGHT
    of_truths = torch.tensor(truths)
    five = logits.topk(5, dim=1).indices
    assert result["top5_right"] == int((five == of_truths[:, None]).any(dim=1).sum())
    loss = float(torch.nn.functional.cross_entropy(logits, of_truths))
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    mistakes = {row["name"]: row["mistaken_for"] for row in result["classes"] if row["images"] == 1}
    expected = {f"{truth:04d}": f"{best[RIGHT + truth]:04d}" for truth in range(CLASSES)}
    assert mistakes == {name: "" if expected[name] == name else expected[name] for name in mistakes}
    assert len(set(mistakes.values())) > 10, "the network predicts the same class for most images"
    imagenets = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    assert logits_of(network, images[:100], **imagenets).argmax(dim=1).tolist() != best[:100]


# --- predictions ---


NAMES = ["n01440764", *(f"<class> {number}" for number in range(1, 10))]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_run(tmp_path_factory.mktemp("run") / "run", names=NAMES))


def shown(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """Return what the command prints, or its error message if it has this status."""
    capsys.readouterr()
    assert predict.main([str(argument) for argument in arguments]) == status
    printed = capsys.readouterr()
    return printed.err if status else printed.out


def test_each_format_has_the_same_classes(weights, images, capsys):
    folder = images / "val"
    whole = json.loads(shown(capsys, weights, folder, "--format", "json", "--top", "10"))
    names = sorted(["n01440764 tench, Tinca tinca", *NAMES[1:]])
    assert all(sorted(each["class"] for each in row["classes"]) == names for row in whole)
    rows = json.loads(shown(capsys, weights, folder, "--top", "2", "--format", "json"))
    assert len(rows) == HELD_OUT_IMAGES
    assert all(len(row["classes"]) == 2 for row in rows)
    text = shown(capsys, weights, folder, "--top", "2", "--format", "csv")
    listed = list(csv.DictReader(io.StringIO(text)))
    assert [(row["file"], row["class"], float(row["probability"])) for row in listed] == [
        (row["file"], each["class"], each["probability"]) for row in rows for each in row["classes"]
    ]
    table = shown(capsys, weights, folder, "--top", "2").splitlines()
    assert [line.split(": ")[0] for line in table] == [row["file"] for row in rows]
    best = rows[0]["classes"][0]
    assert f"{best['class']} {100 * best['probability']:.1f} %" in table[0]


def test_the_page_shows_every_image_and_requests_nothing(weights, images, tmp_path, capsys):
    page = tmp_path / "page.html"
    shown(capsys, weights, images / "val", "--top", "10", "--html", page)
    text = page.read_text()
    assert len(re.findall('src="data:image/jpeg;base64,', text)) == HELD_OUT_IMAGES
    assert "//" not in re.sub('base64,[^"]*', "", text), "an address"
    assert "<class>" not in text
    assert "&lt;class&gt; 3" in text
    missing = ("--html", tmp_path / "no" / "page")
    assert "cannot write" in shown(capsys, weights, images / "val", *missing, status=2)


def test_images_that_cannot_be_read_are_named(weights, tmp_path, capsys):
    Image.fromarray(np.zeros((50, 40, 3), np.uint8)).save(tmp_path / "good.png")
    (tmp_path / "bad.jpg").write_text("not an image")
    (tmp_path / "notes.txt").write_text("of no concern")
    (tmp_path / "lost.jpg").symlink_to("gone")
    assert predict.main([weights, str(tmp_path)]) == predict.LEFT_OUT
    printed = capsys.readouterr()
    assert f"left out: {tmp_path}/lost.jpg cannot be read" in printed.err
    assert f"left out: {tmp_path}/bad.jpg cannot be decoded" in printed.err
    assert printed.out.startswith(f"{tmp_path}/good.png: ")
    assert printed.out.count("\n") == 1
    (tmp_path / "empty").mkdir()
    for source, images, message in (
        (weights, "gone.jpg", "no image or folder"),
        (weights, "empty", "no images in"),
        (tmp_path / "nothing", "", "no weights at"),
    ):
        assert message in shown(capsys, source, tmp_path / images, status=2)


def test_names_are_read_from_stdin_and_a_reader_may_stop_reading(weights, images, tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("\n".join(map(str, sorted((images / "val").rglob("*.jpg")))))
    command = f"{shlex.join(python())} -m horovod_volo.predict {weights} - -b 1 < {names} | head -n 3"
    done = run(["bash", "-o", "pipefail", "-c", command], seconds=100)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(".jpg: ") == 3
    assert "Traceback" not in done.stdout
