"""What the published recipes are for, tried on the demo's ten drawn shapes: does each do what it promises?

Each accuracy is of one seed on 1,000 held-out images, where one standard error is about a point; bars leave
room for it, or there is none and the numbers are only reported (pytest -rP).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from horovod_volo.data.demo.demo_set import make_demo_set
from tests.ranks.launching import python, run, train

OUTPUT = "runs"


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the demo's images, full number, where the runs of these tests go too."""
    if not request.config.getoption("--long"):
        pytest.skip("trains for eight minutes: add --long")
    folder = tmp_path_factory.mktemp("experiments")
    make_demo_set(folder / "images", train=4000, val=1000)
    return folder


def top1(place: Path, name: str, *flags: str) -> float:
    """Train to the end on one rank; return the last evaluation's top-1 in per cent."""
    where = ("--output", str(place / OUTPUT), "--name", name, "--eval-every", "99", "--log-every", "500")
    done = train(str(place / "images"), *flags, *where, ranks=1, start_with="none", seconds=600)
    assert done.returncode == 0, done.stdout
    lines = (place / OUTPUT / name / "metrics.jsonl").read_text().splitlines()
    return float(next(record["top1"] for line in reversed(lines) if "top1" in (record := json.loads(line))))


def tell(**accuracies: float) -> None:
    """Print accuracies where `pytest -s` and the report of a failure show them."""
    sys.stdout.write(", ".join(f"{name} {value:.1f} %" for name, value in accuracies.items()) + "\n")


@pytest.fixture(scope="module")
def coarse_and_fine(place: Path) -> tuple[float, float]:
    """Train at 32 pixels, and go on from there at 64."""
    labels = ("--token-label-data", str(place / "images" / "token_labels"), "--ground-truth")
    low = top1(place, "coarse", "--recipe", "demo", "--img-size", "32", "--epochs", "3", *labels)
    fine = ("--img-size", "64", "--epochs", "4", "--warmup-epochs", "0", "--lr-base", "0.00125")
    start = ("--finetune", str(place / OUTPUT / "coarse"))
    return low, top1(place, "fine", "--recipe", "demo", *fine, *start, *labels)


def test_fine_tuning_at_double_resolution_is_better(coarse_and_fine: tuple[float, float]) -> None:
    low, high = coarse_and_fine
    tell(coarse=low, fine=high)
    assert low > 50
    assert high > low


def test_a_teachers_labels_train_a_student(place: Path, coarse_and_fine: tuple[float, float]) -> None:
    """The fine-tuned network labels every cell; a student learns from that, another from classes alone."""
    store = place / "store"
    program = [*python(), "-m", "horovod_volo.labels"]
    teacher = ["--teacher", str(place / OUTPUT / "fine")]
    made = run([*program, "generate", str(place / "images"), str(store), *teacher], seconds=300)
    assert made.returncode == 0, made.stdout
    student = ("--recipe", "demo", "--img-size", "32", "--epochs", "3")
    learned = ("--token-label-data", str(store), "--ground-truth")
    labelled = top1(place, "labelled", *student, *learned)
    plain = top1(place, "plain", *student, "--no-token-label")
    tell(teacher=coarse_and_fine[1], with_labels=labelled, without=plain)
    assert min(labelled, plain) > 50  # both have learned; in so short a run neither need be ahead


def test_lars_keeps_a_large_batch_as_good_as_a_small_one(place: Path) -> None:
    """Sixteen times the batch: LARS stays within 2 points, plain SGD at sixteen times the rate does not.

    LARS counts its rate in shares of a layer's norm; it is linear in the batch too, 0.5 for 16 images.
    """
    plain = ("--model", "test_resnet", "--img-size", "64", "--no-mix-token", "--scale", "0.6", "1")
    plain += ("--aa", "", "--color-jitter", "0", "--reprob", "0", "--eval-batch-size", "50")
    plain += ("--epochs", "5", "--warmup-epochs", "1", "--cooldown-epochs", "0", "--weight-decay", "1e-4")
    small = top1(place, "small", *plain, "--batch-size", "16", "--opt", "sgd", "--lr", "0.2")
    sgd = top1(place, "sgd", *plain, "--batch-size", "256", "--opt", "sgd", "--lr", "3.2")
    lars = top1(place, "lars", *plain, "--batch-size", "256", "--opt", "lars", "--lr", "8")
    tell(small=small, sgd=sgd, lars=lars)
    assert lars >= small - 2
    assert sgd < small - 2
