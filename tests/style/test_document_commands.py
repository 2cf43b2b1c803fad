"""Every command of README.md and docs/ is run by a test or says what it needs, and its parser accepts it.

A block of commands is run by the test of its document, which RUN_BY names, or the line before it says what it
needs: `<!-- needs: a cluster -->`.
"""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from horovod_volo.__main__ import COMMANDS
from horovod_volo.bench.__main__ import parse as parse_bench
from horovod_volo.config.command_line import parse as parse_train
from tests.documents import DOCUMENTS, ROOT, blocks, calls, commands_in, quoted_commands, text_of

# The test that runs the commands of a document; it fails if the document has a command that it does not run.
RUN_BY = {
    "docs/cluster.md": "tests/smoke/test_cluster_guide.py",
    **dict.fromkeys(
        ("README.md", "docs/tutorial.md", "docs/data.md", "docs/evaluation.md", "docs/export.md"),
        "tests/smoke/test_documented_commands.py",
    ),
}
LANGUAGES = {"sh", "python", "toml", "text", "yaml"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_is_run_or_says_what_it_needs(document: str) -> None:
    text = text_of(document)
    assert {block.language for block in blocks(text)} <= LANGUAGES, "each block names its language"
    if runner := RUN_BY.get(document):
        assert document in text_of(runner)
        return
    named = [path for block in blocks(text) for path in re.findall(r"tests/[\w/.]+", block.needs or "")]
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert commands_in(text) == [], (
        "Run these commands in a test and add the document to RUN_BY, or write on the line before the block "
        "what it needs: <!-- needs: a cluster -->"
    )


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
        module.build_parser().parse_args(arguments)


def test_every_command_is_accepted() -> None:
    names = []
    for text in map(text_of, DOCUMENTS):
        for command in commands_in(text, marked=True) + quoted_commands(text):
            for name, arguments in calls(command):
                accept(name, arguments)
                names.append(name)
    assert len(names) > 80
    assert set(names) >= {"train", "evaluate", "predict", "export", "labels", "pack", "doctor", "bench"}
