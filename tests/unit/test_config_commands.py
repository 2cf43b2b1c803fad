"""All commands treat mistakes in flags as training does: one line, status 2, and the nearest known flag."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

import pytest

from horovod_volo import evaluate, export, labels, pack, train
from horovod_volo.config.arguments import Parser
from horovod_volo.config.command_line import build_parser
from horovod_volo.config.schema import Config
from horovod_volo.doctor import __main__ as doctor

Main = Callable[[list[str]], int]
# The function of each command, and a command line that it accepts.
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train.main, "images"),
    "evaluate": (evaluate.main, "images --weights run"),
    "labels import": (labels.main, "import maps store"),
    "labels generate": (labels.main, "generate images store --teacher volo_demo"),
    "labels verify": (labels.main, "verify store"),
    "labels show": (labels.main, "show store images 0 out.png"),
    "export": (export.main, "run folder"),
    "pack": (pack.main, "images packed"),
    "doctor": (doctor.main, ""),
}
PARSERS = [module.build_parser() for module in (evaluate, labels, export, pack, doctor)]


def refusal(command: str, flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    main, accepted = COMMANDS[command]
    assert main([*shlex.split(accepted), *shlex.split(flags)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("error: ").strip()


MISSPELLED = [
    ("train", "--modle volo_d1", "--modle", "--model"),
    ("evaluate", "--wieghts run", "--wieghts", "--weights"),
    ("evaluate", "--batchsize=3", "--batchsize", "--batch-size"),
    ("labels import", "--clases 3", "--clases", "--classes"),
    ("labels generate", "--techer volo_demo", "--techer", "--teacher"),
    ("labels verify", "--map_geometry whole", "--map_geometry", "--map-geometry"),
    ("labels show", "--hepl", "--hepl", "--help"),
    ("export", "--onxx", "--onxx", "--onnx"),
    ("pack", "--shard-image 10", "--shard-image", "--shard-images"),
    ("doctor", "--sharde runs", "--sharde", "--shared"),
    ("evaluate", "--weight run", "--weight", "--weights"),  # no abbreviations
]


@pytest.mark.parametrize(("command", "flags", "flag", "meant"), MISSPELLED)
def test_an_unknown_flag_is_refused_with_the_nearest_one(
    command: str, flags: str, flag: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(command, flags, capsys) == f"There is no flag {flag}. Did you mean {meant}?"


def test_a_misspelled_required_flag_is_not_said_to_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["images", "--wieghts", "run"]) == 2
    assert capsys.readouterr().err == "error: There is no flag --wieghts. Did you mean --weights?\n"
    assert evaluate.main(["images"]) == 2
    assert "required: --weights. `python -m horovod_volo.evaluate --help`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "known"),
    [
        ("train", "DATA_DIR"),
        ("evaluate", "DATA_DIR"),
        ("labels import", "PT_FOLDER, STORE"),
        ("labels show", "STORE, DATA_DIR, NAME_OR_INDEX, OUT.png"),
        ("export", "SOURCE, FOLDER"),
        ("doctor", "none"),
    ],
)
def test_one_argument_too_many(command: str, known: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = f"'more' is one argument too many. Arguments without a flag: {known}."
    assert refusal(command, "more", capsys) == expected


@pytest.mark.parametrize(
    ("command", "flags", "said"),
    [
        ("evaluate", "--split tran", "--split takes train or val, not 'tran'. Did you mean train?"),
        ("evaluate", "--per-class few", "--per-class takes a whole number of at least 1, not 'few'; or all."),
        ("evaluate", "--v2 --split val", "--split: not allowed with argument --v2"),
        ("labels import", "--classes x", "--classes takes a whole number"),
        ("labels generate", "--top 0", "--top takes a whole number of at least 1"),
        ("labels verify", "--images 1", "--images takes a whole number of at least 2"),
        ("export", "--img-size 31", "--img-size must be at least 32"),
        ("export", "--opset 24", "--opset must be below 24"),
        ("export", "--batch 0", "--batch takes a whole number of at least 1, not '0'; or dynamic."),
        ("pack", "--workers -1", "--workers must be at least 0"),
        ("pack", "--quality 101", "--quality must be below 101"),
        ("pack", "--shard-images 3 --shard-size-mb 256", "--shard-size-mb: not allowed with argument"),
        ("pack", "more", "Give DATA_DIR and OUT_DIR, or only a packed folder with --verify or --catalog."),
        ("doctor", "--binding core2", "--binding takes numa or core or none"),
    ],
)
def test_a_wrong_value_is_refused(
    command: str, flags: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(command, flags, capsys).startswith(said)


def test_an_unknown_command_of_labels_is_refused_with_the_nearest_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert labels.main(["improt", "maps", "store"]) == 2
    expected = (
        "error: COMMAND takes import or generate or verify or show, not 'improt'. Did you mean import?\n"
    )
    assert capsys.readouterr().err == expected


def test_there_is_one_class_of_parser() -> None:
    assert {type(parser) for parser in [build_parser(), *PARSERS]} == {Parser}


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_the_image_size_of_training_can_be_asked_for(command: str) -> None:
    _, accepted = COMMANDS[command]
    parser = {"evaluate": evaluate, "export": export}[command].build_parser()
    options = parser.parse_args([*shlex.split(accepted), "--img-size", "0", "--averaged"])
    assert (options.img_size, options.use_ema, options.model) == (0, True, "")


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("labels generate", "--batch-size 0"),
        ("labels generate", "-b many"),
        ("labels import", "-j 1.5"),
        ("labels import", "--bad-samples ignore"),
    ],
)
def test_a_wrong_value_has_the_message_of_training(
    command: str, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(command, flags, capsys) == refusal("train", flags, capsys)


def test_defaults_are_those_of_training_unless_the_help_says_otherwise() -> None:
    settings, parser = Config(), labels.build_parser()
    generate, imported = (
        parser.parse_args(COMMANDS[f"labels {name}"][1].split()) for name in ("generate", "import")
    )
    assert (generate.batch_size, generate.binding) == (settings.data.batch_size, settings.launch.binding)
    assert (imported.workers, imported.bad_samples) == (settings.data.workers, "fail")
