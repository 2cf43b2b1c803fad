"""The exceptions for mistakes of the user and for damaged samples, and messages on stderr.

Entry points print a UserError's text without a traceback and exit with status 2. The text must therefore say
what is wrong, where, and what to type instead.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from errno import EIO, EPIPE
from functools import wraps
from typing import ParamSpec, TextIO

Arguments = ParamSpec("Arguments")
SHOWN = 100
MISTAKE = 2  # the exit status of a UserError


class UserError(Exception):
    """A mistake that the user can correct; the message contains the remedy."""


class BadSampleError(Exception):
    """An image or label map that cannot be used; the message names it and says what is wrong with it."""


def error_of_code(what: str, error: Exception, remedy: str) -> UserError:
    """Return the error that says where the code of a user, such as a plugin, failed."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return UserError(f"{what}: {text} ({frame.filename}, line {frame.lineno}). {remedy}")


def escape_controls(text: str) -> str:
    r"""Return text that is one line and printable: a line break in the name of a file becomes `\n`."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def show(text: str, *, end: str = "\n", file: TextIO | None = None) -> None:
    """Print text and flush it. A run outlives a full disk, and stops where the reader is gone."""
    try:
        print(text, end=end, file=file, flush=True)
    except OSError as error:
        if signal.getsignal(signal.SIGHUP) in (signal.SIG_DFL, None):  # there is no run
            raise
        if error.errno in (EIO, EPIPE):  # the terminal, `tee` or launcher has ended
            os.dup2(os.open(os.devnull, os.O_WRONLY), (file or sys.stdout).fileno())
            signal.raise_signal(signal.SIGHUP)


def print_error(message: str) -> None:
    """Show a message on stderr, as one line."""
    show(escape_controls(message), file=sys.stderr)


def refuse_mistakes(work: Callable[Arguments, int]) -> Callable[Arguments, int]:
    """Have the work of a command that runs in one process print a mistake and return MISTAKE."""

    @wraps(work)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
        try:
            return work(*args, **kwargs)
        except (UserError, OSError) as problem:
            print_error(f"error: {problem}")
            return MISTAKE

    return run


def counted(number: int, noun: str) -> str:
    """Return a number of things in words: 1 rank, 2 ranks."""
    return f"{number} {noun}{'s' * (number != 1)}"


def list_problems(problems: Sequence[str]) -> None:
    """Print the first `SHOWN` problems to stderr, and how many more there are."""
    for problem in problems[:SHOWN]:
        print(escape_controls(problem), file=sys.stderr)
    if len(problems) > SHOWN:
        print(f"and {len(problems) - SHOWN:,} more", file=sys.stderr)
