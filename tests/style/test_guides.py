"""docs/troubleshooting.md quotes messages of the source; docs/migration.md translates flags into ours."""

from __future__ import annotations

import argparse
import ast
import re

import pytest
import torch.distributed.run

from horovod_volo.config.command_line import build_parser
from tests.documents import ROOT, text_of

TROUBLESHOOTING, MIGRATION = text_of("docs/troubleshooting.md"), text_of("docs/migration.md")
OURS = {flag for action in build_parser()._actions for flag in action.option_strings} | {"data_dir"}


# --- messages -----------------------------------------------------------------------------------


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


def missing_messages(quoted: list[str], texts: list[str]) -> list[str]:
    """Return the quoted messages whose words, apart from `…`, are in no text."""
    missing = []
    for message in quoted:
        parts = [part.strip() for part in message.split("…") if part.strip(" .")]
        pattern = re.compile(".*".join(map(re.escape, parts)), re.S)
        if not any(map(pattern.search, texts)):
            missing.append(message)
    return missing


def test_quoted_messages_are_those_of_the_source() -> None:
    quoted = re.findall(r"^> (.+)$", TROUBLESHOOTING, flags=re.M)
    assert len(quoted) > 40
    assert missing_messages(quoted, texts_of_source()) == []


# --- flags --------------------------------------------------------------------------------------


def rows(section: str) -> list[list[str]]:
    """Return the cells of the table of a section, without its head."""
    text = re.split(rf"^## {re.escape(section)}$", MIGRATION, flags=re.M)[1].split("\n## ")[0]
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
def test_every_flag_of_ours_is_parsed(section: str) -> None:
    parser, count = build_parser(), 0
    for theirs, here, note in rows(section):
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


@pytest.mark.parametrize("section", SECTIONS)
def test_a_flag_that_there_is_is_not_listed_as_missing(section: str) -> None:
    missing = [theirs for theirs, here, _ in rows(section) if here == "none"]
    assert [flag for theirs in missing for flag in flags_in(theirs) if flag in OURS] == []


def test_every_flag_of_torchrun_is_listed() -> None:
    listed = {flag for theirs, *_ in rows("From torchrun") for flag in flags_in(theirs)}
    parser = torch.distributed.run.get_args_parser()
    flags = [action.option_strings for action in parser._actions if action.option_strings]
    assert len(flags) > 20
    assert [names for names in flags if "--help" not in names and not listed & set(names)] == []
