"""A mistake ends the trainer within seconds, with one line that contains the remedy, and writes nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.smoke.conftest import HELD_OUT_IMAGES, TRAIN_IMAGES, EntryResult, run_entry, run_here

MISTAKE, STOPPED = 2, 75
PLAIN = ["--no-mix-token"]
TINY = ["--model", "volo_demo", "--img-size", "32", "-b", "8", "--epochs", "1", "--warmup-epochs", "0"]


def files_under(folder: Path) -> dict[str, tuple[int, int]]:
    """Return sizes and modification times of all files in a folder."""
    found = sorted(folder.rglob("*"))
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in found}


def assert_refused(result: EntryResult, message: str) -> None:
    assert result.status == MISTAKE, result.output
    assert len(result.lines) == 1, result.output
    assert result.lines[0].startswith("error: ")
    assert message in result.lines[0]
    assert result.cpu_seconds < 10


def test_help_is_printed_quickly() -> None:
    result = run_entry("--help")
    assert result.status == 0
    assert result.lines[0].startswith("usage: horovodrun -np RANKS python -m horovod_volo.train DATA_DIR")
    assert result.cpu_seconds < 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modle", "volo_demo"], "There is no flag --modle. Did you mean --model?"),
        (["-b", "41"], "= 41 images, but there are 40. Use --batch-size 40 or less."),
    ],
    ids=["flag", "batch"],
)
def test_mistakes_in_settings(arguments: list[str], message: str, demo_set: Path, tmp_path: Path) -> None:
    result = run_entry(str(demo_set), *TINY, "--output", str(tmp_path / "runs"), *arguments)
    assert_refused(result, message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "volo_d9"], "There is no model 'volo_d9'. Did you mean volo_d"),
        (["--num-classes", "1000"], "has 10 classes. Drop --num-classes."),
        (["--finetune", "/nowhere/weights.pth"], "There are no weights at /nowhere/weights.pth."),
        (["--resume", "/nowhere/run"], "There is no checkpoint at /nowhere/run."),
        (["--token-label", "--token-label-data", "/nowhere/maps"], "/nowhere/maps"),
        (["--output", "/dev/null"], "The run folder /dev/null/volo_demo cannot be written: Not a directory."),
        (["--model", "resnet18", "--mix-token"], "resnet18 gives no token logits. Add --no-token-label"),
        (["--model", "volo_d1_224"], "Use --model volo_d1, which has the same parameters and gives them."),
        (
            ["--img-size", "72"],
            "--img-size must be a multiple of 16 for volo_demo, not 72. The nearest is 64.",
        ),
        (["--no-mix-token", "--img-size", "72"], "must be a multiple of 16 for volo_demo, not 72."),
        (["--opt", "fusedadam"], "--opt fusedadam: NVIDIA Apex is not installed."),
        (["--opt", "lars", "--shard-optimizer"], "--opt lars needs them whole. Use --opt adamw or sgd"),
        (["--model", "vgg11", *PLAIN, "--drop-path", "0.1"], "timm does not build vgg11 with these settings"),
        (["--model", "vgg11", *PLAIN, "--grad-checkpoint"], "vgg11 has no activation checkpointing."),
        (["--model", "test_resnet", *PLAIN, "--finetune", "timm:resnet1"], "timm has no model 'resnet1'."),
    ],
    ids=lambda value: " ".join(value[-3:]) if isinstance(value, list) else "",
)
def test_further_mistakes_in_settings(
    arguments: list[str], message: str, demo_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = [str(demo_set), *TINY, "--output", str(tmp_path / "runs"), *arguments]
    assert_refused(run_here(*given, streams=capfd), message)
    assert not list(tmp_path.iterdir())


def test_a_missing_data_folder(tmp_path: Path) -> None:
    result = run_entry(str(tmp_path / "nowhere"), "--output", str(tmp_path / "runs"))
    assert_refused(result, f"there is no data folder {tmp_path}/nowhere")
    assert not list(tmp_path.iterdir())


def test_an_empty_class_folder(demo_set: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_set / "val", tmp_path / "data" / "val")
    shutil.copytree(demo_set / "train", tmp_path / "data" / "train")
    empty = sorted((tmp_path / "data" / "train").iterdir())[3]
    shutil.rmtree(empty)
    empty.mkdir()
    result = run_entry(str(tmp_path / "data"), *TINY, "--output", str(tmp_path / "runs"))
    assert_refused(result, f"no images in {empty}")
    assert not (tmp_path / "runs").exists()


def test_an_unknown_key_in_a_recipe(demo_set: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[update]\nepoch = 3\n")
    result = run_entry(str(demo_set), "--recipe", str(recipe), "--output", str(tmp_path / "runs"))
    assert_refused(result, f"Recipe {recipe} has an unknown key 'epoch' in [update]. Did you mean epochs?")
    assert list(tmp_path.iterdir()) == [recipe]


# Checkpoints of another run


@pytest.fixture(scope="module")
def stopped_run(demo_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two steps, each with a checkpoint, and return the run folder."""
    output = tmp_path_factory.mktemp("stopped")
    result = run_entry(
        *(str(demo_set), *TINY, "--output", str(output), "--name", "first"),
        *("--checkpoint-every", "1", "--stop-at-step", "2"),
    )
    assert result.status == STOPPED, result.output
    return output / "first"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "first", "--resume", "auto", "--img-size", "64"], "has img_size 32, this run has 64"),
        (
            ["--name", "first", "--resume", "auto", "-b", "5"],
            "batch size x accumulation must be 8: --global-batch 8 sets both",
        ),
        (["--name", "other", "--resume", "FIRST", "--seed", "1"], "has seed 42, this run has 1"),
        (["--name", "first", "--resume", "auto", "--block-shuffle", "4"], "block_shuffle 0, this run has 4"),
        (["--name", "first", "--resume", "FIRST/checkpoints/step_00000001"], "a run up to step_00000002"),
    ],
    ids=["image size", "batch", "seed", "order", "earlier checkpoint"],
)
def test_settings_that_differ_from_the_checkpoint_are_refused(
    arguments: list[str], message: str, stopped_run: Path, demo_set: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = files_under(stopped_run.parent)
    changed = [argument.replace("FIRST", str(stopped_run)) for argument in arguments]
    given = [str(demo_set), *TINY, "--output", str(stopped_run.parent), *changed]
    assert_refused(run_here(*given, streams=capfd), message)
    assert files_under(stopped_run.parent) == before


def test_other_images_than_the_checkpoints_are_refused(
    stopped_run: Path, demo_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each class has the same number of images, but another name of one image changes their order."""
    changed = shutil.copytree(demo_set, tmp_path / "set")
    image = sorted((changed / "train" / "ring").iterdir())[0]
    image.rename(image.with_name("another.jpg"))
    given = [str(changed), *TINY, "--output", str(stopped_run.parent), "--name", "first", "--resume", "auto"]
    assert_refused(run_here(*given, streams=capfd), "Restore the training images as they were")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "already holds a run. Add --resume auto to continue it, or give this run another --name."),
        # The error comes before the large model is built.
        (["--resume", "auto", "--model", "volo_d5"], "has model volo_demo, this run has volo_d5"),
    ],
    ids=["folder taken", "model"],
)
def test_a_folder_of_another_run(
    arguments: list[str], message: str, stopped_run: Path, demo_set: Path
) -> None:
    before = files_under(stopped_run.parent)
    place = ["--output", str(stopped_run.parent), "--name", "first"]
    assert_refused(run_entry(str(demo_set), *TINY, *place, *arguments), message)
    assert files_under(stopped_run.parent) == before


# Several ranks. Only the lines of ranks are checked, because the launcher prints others.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-b", "21"], f"= {2 * 21} images, but there are {TRAIN_IMAGES}. Use --batch-size 20 or less."),
        (["--modle", "volo_demo"], "There is no flag --modle. Did you mean --model?"),
    ],
    ids=["more than there is", "flag"],
)
def test_several_ranks_print_one_message(
    arguments: list[str], message: str, demo_set: Path, tmp_path: Path
) -> None:
    result = run_entry(
        *(str(demo_set), *TINY, "--output", str(tmp_path / "runs"), *arguments), ranks=2, start_with="gloo"
    )
    assert result.status != 0
    # "[0]<stderr>:error: ..."; a rank that the launcher ends after the first prints "Terminated".
    messages = [line for line in result.lines if line[0:1] == "[" and not line.endswith(">:Terminated")]
    assert len(messages) == 1, result.output
    assert messages[0].startswith("[0]<stderr>:error: ")
    assert message in messages[0]
    assert result.cpu_seconds < 2 * 10
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*")]
    assert all("runs/catalogs".startswith(str(path)) or path.suffix == ".catalog" for path in written), (
        written
    )


def test_the_demo_set_has_the_expected_size(demo_set: Path) -> None:
    assert len(list((demo_set / "train").rglob("*.jpg"))) == TRAIN_IMAGES
    assert len(list((demo_set / "val").rglob("*.jpg"))) == HELD_OUT_IMAGES
