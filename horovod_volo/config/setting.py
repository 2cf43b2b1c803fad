"""Declaration of one setting: a dataclass field with help, flags and bounds in its metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of the schema, or a flag that only one command has."""

    help: str
    default: Any
    aliases: tuple[str, ...] = ()  # further flags
    shorthands: Mapping[str, Any] = field(default_factory=dict)  # flags that set a fixed value
    at_least: float | None = None
    below: float | None = None
    positional: bool = False
    repeatable: bool = False  # a comma-separated list, whose flag may be given several times
    name: str = ""
    kind: Any = None  # bool, int, float, str, tuple[float, float], tuple[float, ...] or a Literal
    group: str = ""

    @property
    def flag(self) -> str:
        """Return the flag that has its name, or the placeholder of a positional setting."""
        return self.name.upper() if self.positional else "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """Return all flags that take a value, those of one letter first."""
        return tuple(sorted((self.flag, *self.aliases), key=lambda flag: flag.startswith("--")))


def setting(default: Any, help: str, **declared: Any) -> Any:
    """Declare a field of the schema; `declared` are further fields of Setting."""
    return field(default=default, metadata={"setting": Setting(default=default, help=help, **declared)})
