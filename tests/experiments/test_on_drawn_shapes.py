"""The published methods on the demo's ten drawn shapes: each has the effect that its paper claims.

Each accuracy is of one seed on 1,000 held-out images, with a standard error of about one percentage point.
The bounds allow for it; comparisons without a bound are only printed (pytest -rP).
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from horovod_volo.demo.demo_image import CLASSES
from horovod_volo.demo.demo_set import make_demo_set
from tests.runs import ADAMW, records, start

DEMO = ("--recipe", "demo", *ADAMW)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all images of the demo, in which these tests also put their runs."""
    if not request.config.getoption("--long"):
        pytest.skip("trains for eight minutes: add --long")
    folder = tmp_path_factory.mktemp("experiments")
    make_demo_set(folder / "images", train=4000, val=1000)
    return folder


def top1(folder: Path, name: str, *flags: str, images: str = "") -> float:
    """Train to the end on one rank, by default on all images; return the last top-1 in per cent."""
    flags = (*flags, "--eval-every", "99", "--log-every", "500")
    start(Path(images or folder / "images"), folder / name, *flags, small=(), ranks=1, seconds=600)
    return float(records(folder / name, "top1")[-1]["top1"])


def print_accuracies(**accuracies: float) -> None:
    """Print accuracies, for `pytest -s` and for the report of a failure."""
    sys.stdout.write(", ".join(f"{name} {value:.1f} %" for name, value in accuracies.items()) + "\n")


def test_fine_tuning_at_double_resolution_is_better(folder):
    labels = ("--token-label-data", str(folder / "images" / "token_labels"), "--ground-truth")
    low = top1(folder, "coarse", *DEMO, "--img-size", "32", "--epochs", "3", *labels)
    fine = ("--img-size", "64", "--epochs", "4", "--warmup-epochs", "0", "--lr-base", "0.00125")
    start = ("--finetune", str(folder / "coarse" / "run"))
    high = top1(folder, "fine", *DEMO, *fine, *start, *labels)
    print_accuracies(coarse=low, fine=high)
    assert low > 50
    assert high > low


def copy_classes(folder: Path, name: str, classes: Sequence[str], per_class: int) -> Path:
    """Copy some training images of these classes, and all held-out ones, into a set of their own."""
    for split, most in (("train", per_class), ("val", 100)):
        for label in classes:
            (folder / name / split / label).mkdir(parents=True)
            for file in sorted((folder / "images" / split / label).iterdir())[:most]:
                shutil.copy(file, folder / name / split / label / file.name)
    return folder / name


def test_few_images_of_new_classes_need_weights_of_others(folder):
    """Twenty images of each of four shapes, for a network that has learned six others.

    Three seeds reached 57 to 68 % by fine-tuning, 61 to 67 % with a linear probe, 31 to 32 % from scratch.
    """
    others, new = (*CLASSES[0::2], CLASSES[1]), CLASSES[3::2]
    learned = str(copy_classes(folder, "others", others, 400))
    few = str(copy_classes(folder, "few", new, 20))
    source = top1(folder, "source", *DEMO, "--epochs", "6", images=learned)
    small = ("--model", "volo_demo", "--img-size", "64", "--batch-size", "16", "--precision", "fp32")
    small += ("--epochs", "20", "--eval-batch-size", "50")
    start = ("--finetune", str(folder / "source" / "run"))
    scratch = ("--finetune=", "--layer-decay", "1")
    tuned = top1(folder, "tuned", "--recipe", "finetune_folder", *small, *start, images=few)
    probe = top1(folder, "probe", "--recipe", "linear_probe", *small, *start, images=few)
    fresh = top1(folder, "fresh", "--recipe", "finetune_folder", *small, *scratch, images=few)
    print_accuracies(source=source, tuned=tuned, probe=probe, fresh=fresh)
    assert source > 90
    assert min(tuned, probe) > fresh + 15


def test_lars_trains_a_large_batch_as_well_as_a_small_one(folder):
    """With 16 times the batch LARS loses at most 2 points; SGD with 16 times the learning rate loses more.

    LARS's learning rate is relative to each layer's norm, and scaled linearly too: 0.5 for a batch of 16.
    """
    plain = ("--model", "test_resnet", "--img-size", "64", "--no-mix-token", "--scale", "0.6", "1")
    plain += ("--aa", "", "--color-jitter", "0", "--reprob", "0", "--eval-batch-size", "50")
    plain += ("--epochs", "5", "--warmup-epochs", "1", "--cooldown-epochs", "0", "--weight-decay", "1e-4")
    small = top1(folder, "small", *plain, "--batch-size", "16", "--opt", "sgd", "--lr", "0.2")
    sgd = top1(folder, "sgd", *plain, "--batch-size", "256", "--opt", "sgd", "--lr", "3.2")
    lars = top1(folder, "lars", *plain, "--batch-size", "256", "--opt", "lars", "--lr", "8")
    print_accuracies(small=small, sgd=sgd, lars=lars)
    assert lars >= small - 2
    assert sgd < small - 2
