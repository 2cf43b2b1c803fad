"""The blocks of code of README.md and docs/, and the commands in them."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))]
_BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>.+?) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)
_PROGRAM = re.compile(
    r"(?:^|\s)(?:python -m horovod_volo\.(?P<module>\w+)|horovod-volo (?P<command>[\w-]+)"
    r"|(?:\./)?tools/(?P<tool>pack|labels|export|bench))(?=\s|$)(?P<rest>.*)",
    re.S,
)


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


def text_of(document: str) -> str:
    """Return the text of a document by its path in the repository."""
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(text: str) -> list[CodeBlock]:
    """Return the blocks of code of a text."""
    return [CodeBlock(found["language"], found["code"], found["needs"]) for found in _BLOCK.finditer(text)]


def commands_in(text: str, *, marked: bool = False) -> list[str]:
    """Return the commands of the blocks that do not say what they need; with `marked`, of all blocks."""
    shells = [block for block in blocks(text) if block.language == "sh" and (marked or not block.needs)]
    return [command for block in shells for command in block.commands]


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
