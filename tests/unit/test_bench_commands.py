"""Flags come from the signature of a benchmark, and every command that is documented is understood."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import pytest

from horovod_volo.bench.__main__ import MACHINE, SCALING_STUDY, parse
from horovod_volo.bench.cli import Flag, add_flags
from horovod_volo.bench.results import RESULTS

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"python -m horovod_volo\.bench (\w[^`|\n]*)")


def example(
    *,
    folder: Annotated[str, Flag("where", positional=True)],
    sides: Annotated[Sequence[int], Flag("sides in pixels")] = (8, 16),
    against: Annotated[Sequence[Literal["a", "b"]], Flag("peers", may_be_empty=True)] = ("a",),
    rate: Annotated[float, Flag("rate in images a second")] = 0.5,
    compile: Annotated[bool, Flag("compile it")] = False,
) -> None:
    """Stand for a benchmark."""


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_flags(made, example)
    return made


def test_a_signature_declares_its_flags(parser: argparse.ArgumentParser) -> None:
    found = vars(parser.parse_args(["here"]))
    assert found == {
        "folder": "here",
        "sides": (8, 16),
        "against": ("a",),
        "rate": 0.5,
        "compile": False,
    }
    words = ["here", "--sides", "1", "2", "--against", "--rate", "2", "--compile"]
    found = vars(parser.parse_args(words))
    assert found == {"folder": "here", "sides": [1, 2], "against": [], "rate": 2.0, "compile": True}
    assert "sides in pixels (default: 8 16)" in " ".join(parser.format_help().split())


@pytest.mark.parametrize("flags", ["", "here --sides", "here --against c", "here --rate x"])
def test_what_the_signature_does_not_allow_is_refused(parser: argparse.ArgumentParser, flags: str) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(flags.split())


def documented_commands() -> set[str]:
    """Return what follows `python -m horovod_volo.bench` in documents, and in results that were recorded."""
    files = [ROOT / "README.md", ROOT / "tools" / "bench", *(ROOT / "docs").glob("*.md")]
    found = {command for file in files for command in COMMAND.findall(file.read_text(encoding="utf-8"))}
    for line in RESULTS.read_text(encoding="utf-8").splitlines():
        found.update(COMMAND.findall(json.loads(line)["command"]))
    return found


def test_every_documented_command_is_understood() -> None:
    requests = [parse(shlex.split(command)) for command in documented_commands()]
    named = {request.name for request in requests}
    assert named >= (MACHINE | SCALING_STUDY).keys() - {"step"}  # jobs/scaling.sbatch runs it


@pytest.mark.parametrize(("part", "other"), [("machine", "scaling_study"), ("scaling_study", "machine")])
def test_each_part_can_be_read_alone(part: str, other: str) -> None:
    files = list((ROOT / "horovod_volo" / "bench" / part).glob("*.py"))
    assert len(files) > 5
    assert [file.name for file in files if f"bench.{other}" in file.read_text(encoding="utf-8")] == []
