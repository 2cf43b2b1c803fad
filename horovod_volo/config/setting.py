"""How one setting is declared: a field of a dataclass that carries its help, flags and bounds."""

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
) -> Any:
    """Declare one setting; `flags` are further spellings, `shorthands` flags that set a fixed value."""
    metadata = {
        "help": help,
        "flags": flags,
        "shorthands": shorthands or {},
        "at_least": at_least,
        "below": below,
        "positional": positional,
    }
    return field(default=default, metadata=metadata)
