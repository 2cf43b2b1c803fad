"""Every command of README.md and docs/ is run by a test or says what it needs, and its parser accepts it.

A block of commands is run by the test of its document, which RUN_BY names, or the line before it says what it
needs: `<!-- needs: a cluster -->`.
"""

from __future__ import annotations

import argparse
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from horovod_volo.__main__ import COMMANDS
from horovod_volo.bench.__main__ import parse as parse_bench
from horovod_volo.config.command_line import parse as parse_train

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>.+?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
_PROGRAM = re.compile(
    r"(?:^|\s)(?:python -m horovod_volo\.(?P<module>\w+)|horovod-volo (?P<command>\w+)"
    r"|(?:\./)?tools/(?P<tool>pack|labels|export|bench))(?=\s|$)(?P<rest>.*)",
    re.S,
)
# The test that runs the commands of a document; it fails if the document has a command that it does not run.
RUN_BY = {
    "README.md": "tests/smoke/test_readme.py",
    "docs/tutorial.md": "tests/smoke/test_tutorial.py",
    "docs/data.md": "tests/smoke/test_data_commands.py",
    "docs/evaluation.md": "tests/smoke/test_evaluate.py",
    "docs/export.md": "tests/smoke/test_export.py",
    "docs/cluster.md": "tests/smoke/test_cluster_guide.py",
}
LANGUAGES = {"sh", "python", "toml", "text", "yaml"}


class CodeBlock(NamedTuple):
    """A block of code, its language, and what is said to be missing to run it."""

    language: str
    code: str
    needs: str | None

    @property
    def commands(self) -> list[str]:
        """The command lines of the block, with continued lines joined."""
        joined = self.code.replace("\\\n", " ")
        return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def blocks(text: str) -> list[CodeBlock]:
    """Return the blocks of code of a document."""
    return [CodeBlock(found["language"], found["code"], found["needs"]) for found in _BLOCK.finditer(text)]


def quoted_commands(text: str) -> list[str]:
    """Return the code between backquotes that is a command of this project.

    A name alone, such as `tools/labels import`, is a mention, and so is a command with `...` in it.
    """
    outside = _BLOCK.sub("", text)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]
    return [span for span in spans if "..." not in span and any(map(_is_whole, calls(span)))]


def _is_whole(call: tuple[str, list[str]]) -> bool:
    name, arguments = call
    return len(arguments) > 1 or any(word.startswith("-") for word in arguments) or name == "bench"


def calls(command: str) -> list[tuple[str, list[str]]]:
    """Return the name and the arguments of each of this project's commands in a command line."""
    found = []
    for part in re.split(r"&&|\|(?!\|)", re.sub(r"\s#\s.*", "", command)):
        if match := _PROGRAM.search(part):
            name = match["module"] or match["command"] or match["tool"]
            rest = re.split(r"\s\d?>", match["rest"])[0]  # without redirections
            found.append((name, shlex.split(rest)))
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def unmarked(text: str) -> list[CodeBlock]:
    """Return the blocks of commands that do not say what they need."""
    return [block for block in blocks(text) if block.language == "sh" and not block.needs]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_command_is_run_or_says_what_it_needs(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert {block.language for block in blocks(text)} <= LANGUAGES, "each block names its language"
    if runner := RUN_BY.get(name_of(document)):
        assert document.name in (ROOT / runner).read_text(encoding="utf-8")
        return
    named = [path for block in blocks(text) for path in re.findall(r"tests/[\w/.]+", block.needs or "")]
    assert [path for path in named if not (ROOT / path).exists()] == []
    commands = [command for block in unmarked(text) for command in block.commands]
    assert commands == [], (
        "Run these commands in a test and add the document to RUN_BY, or write on the line before the block "
        "what it needs: <!-- needs: a cluster -->"
    )


def test_a_block_without_a_mark_is_found() -> None:
    text = "<!-- needs: a cluster -->\n```sh\none\n```\n\n```sh\ntwo \\\n  three\n# four\n```\n"
    assert [block.commands for block in unmarked(text)] == [["two    three"]]
    quoted = "`horovod-volo train x --lr 1`, `horovod-volo train ...`, `tools/pack` and\n```sh\na\n```"
    assert quoted_commands(quoted) == ["horovod-volo train x --lr 1"]
    found = calls("A=1 horovodrun -np 2 tools/pack a b > c && python -m horovod_volo.train d --lr 1  # e")
    assert found == [("pack", ["a", "b"]), ("train", ["d", "--lr", "1"])]


def accept(name: str, arguments: list[str]) -> None:
    """Parse the arguments of a command as the command does; a mistake is an error."""
    assert name in COMMANDS, name
    if {"--help", "--help-all"} & set(arguments) or (
        name == "bench" and not [word for word in arguments if word[0] != "-"]
    ):
        return  # tools/bench without a name runs all
    if name == "train":
        parse_train(arguments)
    elif name == "bench":
        parse_bench(arguments)
    else:
        module = import_module(f"horovod_volo.{name}")
        if not hasattr(module, "build_parser"):
            module = import_module(f"horovod_volo.{name}.__main__")
        parser = module.build_parser()
        assert isinstance(parser, argparse.ArgumentParser)
        parser.parse_args(arguments)


def shown_commands(document: Path) -> list[str]:
    text = document.read_text(encoding="utf-8")
    in_blocks = [command for block in blocks(text) if block.language == "sh" for command in block.commands]
    return in_blocks + quoted_commands(text)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_command_is_accepted(document: Path) -> None:
    for command in shown_commands(document):
        for name, arguments in calls(command):
            accept(name, arguments)


def test_many_commands_were_parsed() -> None:
    names = [name for document in DOCUMENTS for shown in shown_commands(document) for name, _ in calls(shown)]
    assert len(names) > 80
    assert set(names) >= {"train", "evaluate", "predict", "export", "labels", "pack", "doctor", "bench"}
