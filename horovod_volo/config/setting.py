"""Declaration of one setting: a dataclass field with help, flags and bounds in its metadata."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    shorthands: dict[str, Any] | None = None,
    at_least: float | None = None,
    below: float | None = None,
    positional: bool = False,
    repeatable: bool = False,
) -> Any:
    """Declare one setting; `flags` are aliases, `shorthands` flags that set a fixed value.

    A `repeatable` setting is a comma-separated list, whose flag may be given several times.
    """
    metadata = {
        "help": help,
        "flags": flags,
        "shorthands": shorthands or {},
        "at_least": at_least,
        "below": below,
        "positional": positional,
        "repeatable": repeatable,
    }
    return field(default=default, metadata=metadata)
