"""What went wrong, or could not be used, on the error stream."""

from __future__ import annotations

import sys
from collections.abc import Sequence

SHOWN = 100


def tell(message: str) -> None:
    """Print a message at once."""
    print(message, file=sys.stderr, flush=True)


def list_problems(problems: Sequence[str]) -> None:
    """Print the first problems and how many more there are."""
    for problem in problems[:SHOWN]:
        print(problem, file=sys.stderr)
    if len(problems) > SHOWN:
        print(f"and {len(problems) - SHOWN:,} more", file=sys.stderr)
