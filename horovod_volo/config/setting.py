"""Declaration of a setting: what it is and takes, when it has an effect, and what other programs call it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from horovod_volo.config.schema import Config

# Types of settings with the bounds that many have.
Count = Annotated[int, {"at_least": 1}]
CountOrZero = Annotated[int, {"at_least": 0}]
NonNegative = Annotated[float, {"at_least": 0.0}]
Fraction = Annotated[float, {"at_least": 0.0, "at_most": 1.0}]
BelowOne = Annotated[float, {"at_least": 0.0, "below": 1.0}]
Range = Annotated[tuple[float, float], {"ascending": True}]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of the schema, or a flag that only one command has."""

    help: str
    default: Any
    aliases: tuple[str, ...] = ()  # further flags
    also: tuple[str, ...] = ()  # what other programs call it: refused, with a hint
    shorthands: Mapping[str, Any] = field(default_factory=dict)  # flags that set a fixed value
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    ascending: bool = False  # of two numbers: both above 0, the second not below the first
    positional: bool = False
    repeatable: bool = False  # a comma-separated list, whose flag may be given several times
    needs: str = ""  # the flag without which it is a mistake
    excludes: Mapping[str, str] = field(default_factory=dict)  # the message, by the other's flag
    idle: tuple[str, ...] = ()  # why it has no effect: conditions of validation.holds
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

    def value_in(self, config: Config) -> Any:
        """Return the value of this setting of the schema."""
        return getattr(getattr(config, self.group), self.name)


def setting(default: Any, help: str, **declared: Any) -> Any:
    """Declare a field of the schema; `declared` are further fields of Setting."""
    return field(default=default, metadata={"setting": Setting(default=default, help=help, **declared)})
