"""A mistake ends the trainer within seconds, with one line that contains the remedy, and writes nothing."""

import shutil
from pathlib import Path

import pytest

from horovod_volo.train import main
from tests.ranks.launching import train
from tests.runs import MISTAKE, STOPPED
from tests.smoke.conftest import TRAIN_IMAGES, EntryResult, files_under, run_entry, run_here

TINY = ["--model", "volo_demo", "--img-size", "32", "-b", "8", "--epochs", "1", "--warmup-epochs", "0"]


def assert_refused(result: EntryResult, message: str) -> None:
    assert result.status == MISTAKE, result.output
    assert len(result.output.splitlines()) == 1, result.output
    assert result.output.startswith("error: ")
    assert message in result.output
    assert result.cpu_seconds < 10


def test_help_and_mistakes_in_flags_are_printed_quickly(images: Path, tmp_path: Path) -> None:
    """In an interpreter of its own, which does not import PyTorch."""
    helped = run_entry("--help")
    assert helped.status == 0
    assert helped.output.startswith("usage: [horovodrun -np RANKS] horovod-volo train DATA_DIR")
    mistaken = run_entry(str(images), *TINY, "--output", str(tmp_path / "runs"), "--modle", "volo_demo")
    assert_refused(mistaken, "There is no flag --modle. Did you mean --model?")
    assert max(helped.cpu_seconds, mistaken.cpu_seconds) < 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--num-classes 1000", "has 10 classes. Drop --num-classes."),
        ("--finetune /nowhere/weights.pth", "There are no weights at /nowhere/weights.pth."),
        ("--resume /nowhere/run", "There is no checkpoint at /nowhere/run."),
        ("--token-label --token-label-data /nowhere/maps", "/nowhere/maps"),
        ("--output /dev/null", "The run folder /dev/null/volo_demo cannot be written: Not a directory."),
        ("--model resnet18 --mix-token", "resnet18 gives no token logits. Add --no-token-label"),
        ("--model volo_d1_224", "Use --model volo_d1, which has the same parameters and gives them."),
        ("--opt lars --shard-optimizer", "--opt lars needs them whole. Use --opt adamw or sgd"),
        ("--opt muon --shard-optimizer", "--opt muon needs them whole."),
        ("--model vgg11 --no-mix-token --drop-path 0.1", "timm does not build vgg11 with these settings"),
        ("--model vgg11 --no-mix-token --grad-checkpoint", "vgg11 has no activation checkpointing."),
        ("--model test_resnet --no-mix-token --finetune timm:resnet1", "timm has no model 'resnet1'."),
        ("--token-label --token-label-data maps --map-geometry middle", "is not a geometry of label maps"),
    ],
)
def test_mistakes_in_settings(arguments, message, images, tmp_path, capfd):
    given = [str(images), *TINY, "--output", str(tmp_path / "runs"), *arguments.split()]
    assert_refused(run_here(*given, streams=capfd), message)
    assert not list(tmp_path.iterdir())


def test_mistakes_in_the_data_folder(images, tmp_path, capfd):
    where = ("--output", str(tmp_path / "runs"))
    result = run_here(str(tmp_path / "nowhere"), *where, streams=capfd)
    assert_refused(result, f"there is no data folder {tmp_path}/nowhere")
    data = shutil.copytree(images, tmp_path / "data")
    empty = sorted((data / "train").iterdir())[3]
    shutil.rmtree(empty)
    empty.mkdir()
    assert_refused(run_here(str(data), *TINY, *where, streams=capfd), f"no images in {empty}")
    assert not (tmp_path / "runs").exists()


# Checkpoints of another run


@pytest.fixture(scope="module")
def stopped_run(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train two steps, each with a checkpoint, and return the run folder."""
    output = tmp_path_factory.mktemp("stopped")
    settings = (str(images), *TINY, "--output", str(output), "--name", "first")
    assert main([*settings, "--checkpoint-every", "1", "--stop-at-step", "2"]) == STOPPED
    return output / "first"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("first", "already holds a run. Add --resume auto to continue it, or give this run another --name."),
        # Before the large model is built.
        ("first --resume auto --model volo_d5", "has model volo_demo, this run has volo_d5"),
        ("first --resume auto --img-size 64", "has img_size 32, this run has 64"),
        ("first --resume auto -b 5", "batch size x accumulation must be 8: --global-batch 8 sets both"),
        ("other --resume {first} --seed 1", "has seed 42, this run has 1"),
        ("first --resume auto --block-shuffle 4", "block_shuffle 0, this run has 4"),
        ("first --resume {first}/checkpoints/step_00000001", "a run up to step_00000002"),
    ],
)
def test_settings_that_differ_from_the_checkpoint_are_refused(arguments, message, stopped_run, images, capfd):
    before = files_under(stopped_run.parent)
    name, *flags = arguments.format(first=stopped_run).split()
    given = [str(images), *TINY, "--output", str(stopped_run.parent), "--name", name, *flags]
    assert_refused(run_here(*given, streams=capfd), message)
    assert files_under(stopped_run.parent) == before


def test_other_images_than_the_checkpoints_are_refused(stopped_run, images, tmp_path, capfd):
    """Each class has the same number of images, but another name of one image changes their order."""
    changed = shutil.copytree(images, tmp_path / "set")
    image = sorted((changed / "train" / "ring").iterdir())[0]
    image.rename(image.with_name("another.jpg"))
    given = [str(changed), *TINY, "--output", str(stopped_run.parent), "--name", "first", "--resume", "auto"]
    assert_refused(run_here(*given, streams=capfd), "Restore the training images as they were")


# Several ranks. Only the lines of ranks are checked, because the launcher prints others.


def test_several_ranks_print_one_message(images: Path, tmp_path: Path) -> None:
    given = [str(images), *TINY, "--output", str(tmp_path / "runs"), "-b", "21"]
    done = train(*given, ranks=2, start_with="gloo")
    assert done.returncode != 0
    # "[0]<stderr>:error: ..."; a rank that the launcher ends after the first prints "Terminated".
    of_ranks = [line for line in done.stdout.splitlines() if line.startswith("[")]
    messages = [line for line in of_ranks if not line.endswith(">:Terminated")]
    assert len(messages) == 1, done.stdout
    assert messages[0].startswith("[0]<stderr>:error: ")
    assert f"= 42 images, but there are {TRAIN_IMAGES}. Use --batch-size 20 or less." in messages[0]
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*")]
    expected = ("runs", "runs/catalogs")
    assert [path for path in written if str(path) not in expected and path.suffix != ".catalog"] == []
