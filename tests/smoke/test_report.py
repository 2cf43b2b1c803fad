"""`report` on a real run that was stopped and resumed, with its pictures."""

import json
from pathlib import Path

import pytest

from horovod_volo.report.__main__ import main
from tests.runs import records, start
from tests.smoke.conftest import HELD_OUT_IMAGES
from tests.unit.parsed_page import ParsedPage

FLAGS = ("--recipe", "demo", "--epochs", "2", "--eval-every", "1", "--log-every", "1", "--ema-decay", "0.5")


@pytest.fixture(scope="module")
def run_folder(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on a few images, with an interruption."""
    output = tmp_path_factory.mktemp("runs")
    start(images, output, small=FLAGS, ranks=1, stop_at=3)
    start(images, output, "--resume", "auto", small=FLAGS, ranks=1)
    return output / "run"


def test_the_page_of_a_real_run(run_folder: Path) -> None:
    assert main([str(run_folder)]) == 0
    page = ParsedPage((run_folder / "report.html").read_text(encoding="utf-8"))
    sections = ["At a glance", "Quality on held-out images", "Training", "Speed", "Worst classes"]
    assert page.texts("h2") == [*sections, "Environment", "Recipe"]
    logged = records(run_folder.parent)
    assert len(page.column("Loss against epochs")) == sum("lr" in each for each in logged)
    assert f"{logged[-1]['top1']:.2f} %" in page.text
    assert "finished, resumed at step 3" in page.texts("dd")
    assert any("parameters" in text for text in page.texts("dd"))  # of the banner in environment.json
    packages = page.column("Versions and hosts")
    assert packages["torch"] == json.loads((run_folder / "environment.json").read_text())["packages"]["torch"]
    assert page.column("What differs from the defaults", 2)["update.epochs"] == "2"


def test_the_worst_classes_have_pictures_while_the_data_is_there(run_folder, images, tmp_path):
    found = json.loads((run_folder / "confusions.json").read_text())
    last = records(run_folder.parent)[-1]
    assert (found["step"], found["top1"]) == (last["step"], max(last["top1"], last["ema_top1"]))
    assert found["images"] == HELD_OUT_IMAGES
    wrong = [each for row in found["worst"] for each in row["wrong"]]
    assert wrong
    pages = []
    for flags in ((), ("--data-dir", str(tmp_path)), ("--data-dir", str(images))):
        assert main([str(run_folder), "--html", str(tmp_path / "page.html"), *flags]) == 0
        pages.append(ParsedPage((tmp_path / "page.html").read_text(encoding="utf-8")))
    for page in (pages[0], pages[2]):
        pictures = [found for tag, found in page.elements if tag == "img"]
        assert [picture["title"] for picture in pictures] == [each["location"] for each in wrong]
        assert all(picture["src"].startswith("data:image/jpeg;base64,") for picture in pictures)
    assert not any(tag == "img" for tag, _ in pages[1].elements)
    assert all(each["location"] in pages[1].texts("span") for each in wrong)
    assert "--data-dir names the folder" in pages[1].text
