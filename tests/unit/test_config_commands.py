"""All commands treat mistakes in flags as training does: one line, status 2, and the nearest known flag."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

import pytest

from horovod_volo import evaluate, export, labels, pack, train
from horovod_volo.config.schema import Config
from horovod_volo.doctor import __main__ as doctor

# The function of each command, and a command line that it accepts.
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train.main, "images"),
    "evaluate": (evaluate.main, "images --weights run"),
    "labels": (labels.main, ""),
    "labels import": (labels.main, "import maps store"),
    "labels generate": (labels.main, "generate images store --teacher volo_demo"),
    "labels verify": (labels.main, "verify store"),
    "labels show": (labels.main, "show store images 0 out.png"),
    "export": (export.main, "run folder"),
    "pack": (pack.main, "images packed"),
    "doctor": (doctor.main, ""),
}


def refusal(command: str, flags: str, capsys: pytest.CaptureFixture[str]) -> str:
    main, accepted = COMMANDS[command]
    assert main([*shlex.split(accepted), *shlex.split(flags)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err


# A command, flags, and what its error must name: the flag, and the remedy.
MISTAKES = [
    ("train", "--modle volo_d1", "--modle", "Did you mean --model?"),
    ("evaluate", "--batchsize=3", "--batchsize", "Did you mean --batch-size?"),
    ("evaluate", "--weight run", "--weight.", "Did you mean --weights?"),  # no abbreviations
    ("labels import", "--clases 3", "--clases", "Did you mean --classes?"),
    ("labels generate", "--techer volo_demo", "--techer", "Did you mean --teacher?"),
    ("labels verify", "--map_geometry whole", "--map_geometry", "Did you mean --map-geometry?"),
    ("labels show", "--hepl", "--hepl", "Did you mean --help?"),
    ("labels", "improt maps store", "COMMAND", "'improt'. Did you mean import?"),
    ("export", "--onxx", "--onxx", "Did you mean --onnx?"),
    ("pack", "--shard-image 10", "--shard-image.", "Did you mean --shard-images?"),
    ("doctor", "--sharde runs", "--sharde", "Did you mean --shared?"),
    ("train", "more", "'more' is one argument too many", "DATA_DIR"),
    ("labels show", "more", "'more' is one argument too many", "STORE, DATA_DIR, NAME_OR_INDEX, OUT.png"),
    ("doctor", "more", "'more' is one argument too many", "none"),
    ("evaluate", "--split tran", "--split", "'tran'", "Did you mean train?"),
    ("evaluate", "--per-class few", "--per-class", "at least 1", "'few'", "all"),
    ("evaluate", "--v2 --split val", "--split", "not allowed with argument --v2"),
    ("labels import", "--classes x", "--classes takes a whole number"),
    ("labels generate", "--top 0", "--top takes a whole number of at least 1"),
    ("labels verify", "--images 1", "--images takes a whole number of at least 2"),
    ("export", "--img-size 31", "--img-size must be at least 32"),
    ("export", "--opset 24", "--opset must be below 24"),
    ("export", "--batch 0", "--batch", "at least 1", "dynamic"),
    ("pack", "--workers -1", "--workers must be at least 0"),
    ("pack", "--quality 101", "--quality must be below 101"),
    ("pack", "--shard-images 3 --shard-size-mb 256", "--shard-size-mb", "not allowed with argument"),
    ("pack", "more", "DATA_DIR and OUT_DIR", "--verify or --catalog"),
    ("doctor", "--binding core2", "--binding takes numa or core or none"),
]


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: " ".join(case[:2]))
def test_a_mistake_names_the_flag_and_the_remedy(
    case: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command, flags, *said = case
    message = refusal(command, flags, capsys)
    assert [text for text in said if text not in message] == []


def test_a_misspelled_required_flag_is_not_said_to_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["images", "--wieghts", "run"]) == 2
    assert "There is no flag --wieghts. Did you mean --weights?" in capsys.readouterr().err
    assert evaluate.main(["images"]) == 2
    assert "required: --weights" in capsys.readouterr().err


def test_defaults_are_those_of_training_unless_the_help_says_otherwise() -> None:
    settings = Config()
    generate, imported, evaluated, exported = (
        module.build_parser().parse_args(COMMANDS[name][1].split())
        for module, name in (
            (labels, "labels generate"),
            (labels, "labels import"),
            (evaluate, "evaluate"),
            (export, "export"),
        )
    )
    assert (generate.batch_size, generate.binding) == (settings.data.batch_size, settings.launch.binding)
    assert (imported.workers, imported.bad_samples) == (settings.data.workers, "fail")
    for name in ("crop_pct", "batch_size", "workers", "catalog_dir"):
        assert getattr(evaluated, name) == getattr(settings.data, name)
    assert evaluated.precision == settings.model.precision
    for options in (evaluated, exported):  # training's own are for a new model
        assert (options.img_size, options.model, options.use_ema) == (0, "", False)
