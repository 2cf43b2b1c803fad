"""Messages on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence

SHOWN = 100


def print_error(message: str) -> None:
    """Print a message to stderr and flush it."""
    print(message, file=sys.stderr, flush=True)


def list_problems(problems: Sequence[str]) -> None:
    """Print the first `SHOWN` problems to stderr, and how many more there are."""
    for problem in problems[:SHOWN]:
        print(problem, file=sys.stderr)
    if len(problems) > SHOWN:
        print(f"and {len(problems) - SHOWN:,} more", file=sys.stderr)
