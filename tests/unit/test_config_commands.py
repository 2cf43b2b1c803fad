"""All commands treat mistakes in flags as training does: one line, status 2, and the nearest known flag."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

import pytest

from horovod_volo import evaluate, export, labels, pack, train
from horovod_volo.doctor import __main__ as doctor

# The function of each command, and a command line that it accepts.
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "train": (train.main, "images"),
    "evaluate": (evaluate.main, "images --weights run"),
    "labels": (labels.main, ""),
    "labels import": (labels.main, "import maps store --data images"),
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
    ("evaluate", "--batchsize=3", "--batchsize", "Did you mean --batch-size?"),
    ("evaluate", "--weight run", "--weight.", "Did you mean --weights?"),  # no abbreviations
    ("labels generate", "--techer volo_demo", "--techer", "Did you mean --teacher?"),
    ("labels show", "--hepl", "--hepl", "Did you mean --help?"),
    ("labels", "improt maps store", "COMMAND", "'improt'. Did you mean import?"),
    ("doctor", "--sharde runs", "--sharde", "Did you mean --shared?"),
    ("train", "more", "'more' is one argument too many", "DATA_DIR"),
    ("labels show", "more", "'more' is one argument too many", "STORE, DATA_DIR, NAME_OR_INDEX, OUT.png"),
    ("evaluate", "--split tran", "--split", "'tran'", "Did you mean train?"),
    ("evaluate", "--per-class few", "--per-class", "at least 1", "'few'", "all"),
    ("evaluate", "--v2 --split val", "--split", "not allowed with argument --v2"),
    ("labels generate", "--top 0", "--top takes a whole number of at least 1"),
    ("export", "--img-size 31", "--img-size must be at least 32"),
    ("export", "--opset 24", "--opset must be below 24"),
    ("export", "--batch 0", "--batch", "at least 1", "dynamic"),
    ("pack", "--quality 101", "--quality must be below 101"),
    ("pack", "--shard-images 3 --shard-size-mb 256", "--shard-size-mb", "not allowed with argument"),
    ("pack", "more", "DATA_DIR and OUT_DIR", "--verify or --catalog"),
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
