"""README.md and docs/: their commands are run and accepted, their files, links, messages and flags exist.

A block of commands is run by the test of its document, which RUN_BY names, or the line before it says what it
needs: `<!-- needs: a cluster -->`.
"""

import argparse
import ast
import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed.run

from horovod_volo.__main__ import COMMANDS
from horovod_volo.bench.__main__ import parse as parse_bench
from horovod_volo.bench.results import markdown, read_records
from horovod_volo.config.command_line import build_parser
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
        module = import_module(f"horovod_volo.{name.replace('-', '_')}")
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


def prose(document: Path) -> str:
    """Return the text of a document without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(document), flags=re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(document: Path) -> list[str]:
    """Return the links and pictures of a document that lead to no file, or to no heading of a document."""
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if link.startswith(("https://", "mailto:")):
            continue
        file, _, heading = link.partition("#")
        target = document.parent / file if file else document
        if not target.exists() or (heading and heading not in anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_and_links_of_a_document_exist(document: str) -> None:
    files = r"`((?:[\w.]+/)+\w+\.py|(?:models|kernels|engine|cluster|data|optim)/(?:\w+/)*)`"
    places = ROOT, ROOT / "horovod_volo"
    named = re.findall(files, text_of(document))
    assert [path for path in named if not any((place / path).exists() for place in places)] == []
    assert dead_links(ROOT / document) == []


OURS = {flag for action in build_parser()._actions for flag in action.option_strings} | {"data_dir"}


def texts_of_source() -> list[str]:
    """Return the texts of the package, with a NUL in the place of each value that is filled in."""
    found = []
    for file in (ROOT / "horovod_volo").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_quoted_messages_are_those_of_the_source() -> None:
    """All their words, apart from `…`, are in one text."""
    rows = re.findall(r"^\| (.+?) \|", text_of("docs/troubleshooting.md"), flags=re.M)
    quoted, texts = [row for row in rows if row != "Message"], texts_of_source()
    assert len(quoted) > 40
    for message in quoted:
        parts = [part.strip() for part in message.split("…") if part.strip(" .")]
        assert any(map(re.compile(".*".join(map(re.escape, parts)), re.S).search, texts)), message


def rows(section: str) -> list[list[str]]:
    """Return the cells of the table of a section, without its head."""
    migration = text_of("docs/migration.md")
    text = re.split(rf"^## {re.escape(section)}$", migration, flags=re.M)[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def flags_in(cell: str) -> list[str]:
    """Return the flags in the code of a cell."""
    return [
        flag
        for code in re.findall(r"`([^`]+)`", cell)
        for flag in re.findall(r"(?<!\S)--?[a-zA-Z][\w-]*", code)
    ]


SECTIONS = ("From torchrun", "From sail-sg/volo and TokenLabeling", "From timm's train.py")


@pytest.mark.parametrize("section", SECTIONS)
def test_every_flag_of_ours_is_parsed_and_none_is_listed_as_missing(section: str) -> None:
    parser, count = build_parser(), 0
    for theirs, here, note in rows(section):
        assert here != "none" or not OURS & set(flags_in(theirs)), theirs
        if here == "the same":
            same = flags_in(theirs) or re.findall(r"`(\w+)`", theirs)
            assert [flag for flag in same if flag not in OURS] == [], theirs
            count += len(same)
        for code in re.findall(r"`(--[^`]+|-[a-z][^`]*)`", f"{here} {note}"):
            words = [word.strip('"') for word in code.split()]
            count += 1
            if len(words) == 1 and code not in ("--elastic",):
                assert code in OURS, code
            else:
                assert isinstance(parser.parse_args(words), argparse.Namespace)
    assert count > (3 if section == SECTIONS[0] else 20)


def test_every_flag_of_torchrun_is_listed() -> None:
    listed = {flag for theirs, *_ in rows("From torchrun") for flag in flags_in(theirs)}
    parser = torch.distributed.run.get_args_parser()
    flags = [action.option_strings for action in parser._actions if action.option_strings]
    assert len(flags) > 20
    assert [names for names in flags if "--help" not in names and not listed & set(names)] == []


def test_the_table_is_generated_from_the_results() -> None:
    pattern = r"<!-- results -->\n(.*?)\n?<!-- /results -->"
    (block,) = re.findall(pattern, text_of("docs/results.md"), flags=re.DOTALL)
    assert block.strip() == markdown(read_records()), (
        "Replace the text between the markers with the output of: python -m horovod_volo.bench table"
    )


def test_tools_bench_measures_every_recorded_result() -> None:
    shown = subprocess.run(
        [ROOT / "tools" / "bench", "--plan"], capture_output=True, text=True, check=True, timeout=20
    )
    newest = {record["name"]: record for record in read_records()}.values()
    recorded = {record["command"] for record in newest if record["hardware"]["gpu"] == "none"}
    assert recorded == set(shown.stdout.splitlines())
