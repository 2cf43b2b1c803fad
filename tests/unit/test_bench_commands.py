"""Flags come from the signature of a benchmark, and every command that was recorded is understood."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from typing import Annotated, Literal

import pytest

from horovod_volo.bench.__main__ import parse
from horovod_volo.bench.results import Flag, add_flags, read_records


def example(
    *,
    folder: Annotated[str, Flag("where")],
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
    assert found == {"folder": "here", "sides": (8, 16), "against": ("a",), "rate": 0.5, "compile": False}
    words = ["here", "--sides", "1", "2", "--against", "--rate", "2", "--compile"]
    found = vars(parser.parse_args(words))
    assert found == {"folder": "here", "sides": [1, 2], "against": [], "rate": 2.0, "compile": True}
    assert "sides in pixels (default: 8 16)" in " ".join(parser.format_help().split())


@pytest.mark.parametrize("flags", ["", "here --sides", "here --against c", "here --rate x"])
def test_what_the_signature_does_not_allow_is_refused(parser: argparse.ArgumentParser, flags: str) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(flags.split())


def test_recorded_commands_are_understood() -> None:
    """Those of documents are parsed by tests/style/test_document_commands.py."""
    for record in read_records():
        words = shlex.split(record["command"])
        parse(words[words.index("horovod_volo.bench") + 1 :])
