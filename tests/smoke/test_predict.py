"""horovod_volo.predict: its classes are those of an evaluation, in each format; mistakes are explained."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from horovod_volo import predict
from horovod_volo.config.data_settings import Data
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.loader import EvalLoader
from horovod_volo.evaluation import predictions
from horovod_volo.evaluation.predictions import PredictRequest
from horovod_volo.models.pretrained import load_pretrained
from tests.ranks.launching import python, run
from tests.smoke.conftest import HELD_OUT_IMAGES, save_run

NAMES = ["n01440764", *(f"<class> {number}" for number in range(1, 10))]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a run folder whose classes have names."""
    return str(save_run(tmp_path_factory.mktemp("run") / "run", names=NAMES))


def shown(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    """Return what the command prints to stdout."""
    capsys.readouterr()
    assert predict.main([str(argument) for argument in arguments]) == status
    return capsys.readouterr().out


def test_the_probabilities_are_those_of_an_evaluation(weights: str, demo_set: Path) -> None:
    trained = load_pretrained(weights)
    catalog = build_catalog(str(demo_set), "val", None)
    sizes: dict[str, Any] = {"image_size": 64, "crop_pct": 0.9, "rank": 0, "size": 1}
    loader = EvalLoader(catalog, Data(batch_size=16), device=torch.device("cpu"), threads=2, **sizes)
    expected = {}
    with closing(loader), torch.inference_mode():
        for batch in loader:
            shares = trained.network(batch.images).softmax(dim=1)
            expected |= dict(zip(batch.indices.tolist(), shares, strict=False))
    files = [Path(catalog.location(index)) for index in range(len(catalog))]
    request = PredictRequest(top=10, crop_pct=0.9, batch_size=7, precision="fp32")
    found = dict(predictions.predict(trained, files, request, []))
    assert list(found) == list(range(len(files)))
    names = ["n01440764 tench, Tinca tinca", *NAMES[1:]]
    for index, classes in found.items():
        shares = [share for _, share in classes]
        assert shares == sorted(shares, reverse=True)
        by_name, wanted = dict(classes), expected[index].tolist()
        assert [by_name[name] for name in names] == pytest.approx(wanted, abs=0.03)  # the decoders differ


def test_each_format_has_the_same_classes(
    weights: str, demo_set: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = demo_set / "val"
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


def test_the_page_shows_every_image_and_requests_nothing(
    weights: str, demo_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    shown(capsys, weights, demo_set / "val", "--top", "10", "--html", page)
    text = page.read_text()
    assert len(re.findall('src="data:image/jpeg;base64,', text)) == HELD_OUT_IMAGES
    assert "//" not in re.sub('base64,[^"]*', "", text), "an address"
    assert "<class>" not in text
    assert "&lt;class&gt; 3" in text
    assert "cannot write" in mistake(capsys, weights, demo_set / "val", "--html", tmp_path / "no" / "page")


def mistake(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the message of a command that is refused."""
    capsys.readouterr()
    assert predict.main([str(argument) for argument in arguments]) == 2
    return capsys.readouterr().err


def test_images_that_cannot_be_read_are_named(
    weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        assert message in mistake(capsys, source, tmp_path / images)


def test_names_are_read_from_stdin_and_a_reader_may_stop_reading(
    weights: str, demo_set: Path, tmp_path: Path
) -> None:
    names = tmp_path / "names.txt"
    names.write_text("\n".join(map(str, sorted((demo_set / "val").rglob("*.jpg")))))
    command = f"{shlex.join(python())} -m horovod_volo.predict {weights} - -b 1 < {names} | head -n 3"
    done = run(["bash", "-o", "pipefail", "-c", command], seconds=100)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(".jpg: ") == 3
    assert "Traceback" not in done.stdout
