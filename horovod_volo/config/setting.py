"""Declaration of a setting: what it is and takes, when it has an effect, and what other programs call it.

The checks and conversions of its values are here too.
"""

from __future__ import annotations

import math
from ast import literal_eval
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

from horovod_volo.core.errors import UserError
from horovod_volo.core.names import nearest

if TYPE_CHECKING:
    from horovod_volo.config.schema import Config

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_SPELLED = {"float16": "fp16", "bfloat16": "bf16"}  # our values by those of other programs
_PAIR, _CHANNELS = 2, 3  # tuple[float, float]: low and high; tuple[float, ...]: red, green and blue, or none

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
    # What other programs call it, which --help leaves out. FLAG=VALUE is a switch that sets it; with {}
    # in VALUE, the flag takes what {} stands for.
    also: tuple[str, ...] = ()
    bare: str = ""  # the value of its flag without one
    joined: str = ""  # its flag takes several words, which this joins into one text
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

    @property
    def count(self) -> int:
        """Return how many numbers the setting is: two or three; 0: it is none of these."""
        if get_origin(self.kind) is not tuple:
            return 0
        return _CHANNELS if Ellipsis in get_args(self.kind) else _PAIR

    @property
    def metavar(self) -> str | tuple[str, ...]:
        """Return the placeholder of the value in --help: its choices, or its type."""
        if self.positional:
            return self.flag
        if get_origin(self.kind) is Literal:
            return "{" + ",".join(get_args(self.kind)) + "}"
        if self.count:
            pair = ("LOW", "HIGH") if self.ascending else ("X", "X")
            return pair if self.count == _PAIR else ("RED", "GREEN", "BLUE")
        return {int: "N", float: "X"}.get(self.kind, "TEXT")

    def from_text(self, text: str | list[str]) -> Any:
        """Convert and check a command-line value; that of several numbers is a list of texts."""
        if isinstance(text, list) and self.kind is int:  # timm's --input-size
            channels, text, width = text
            if channels != "3" or text != width:
                raise UserError(
                    f"Images are squares of three channels: {self.flag} N, or --input-size 3 N N."
                )
        value: Any = text
        with suppress(ValueError):  # `checked` says what it takes
            if self.count:
                value = list(map(float, text))
            elif isinstance(text, list):
                value = self.joined.join(text)
            elif self.kind in (int, float):
                value = self.kind(text)
            elif self.kind is not str:
                value = _SPELLED.get(text, text)
        return self.checked(value, self.flag)

    def checked(self, value: Any, where: str) -> Any:
        """Return a value in the setting's type, or raise UserError; a float may be a whole number."""
        if self.kind is float and type(value) is int:
            value = float(value)
        if problem := self._problem(value):
            raise UserError(f"{where} {problem}")
        return tuple(map(float, value)) if self.count else value

    def _problem(self, value: Any) -> str:
        """Return what the value must be instead, or an empty string."""
        numbers = value if self.count and isinstance(value, list | tuple) else (value,)
        if self.count:
            if not numbers and not self.default:
                return ""
            finite = all(type(number) in (int, float) and math.isfinite(number) for number in numbers)
            if len(numbers) != self.count or not finite:
                return f"takes {'two' if self.count == _PAIR else 'three'} numbers, not {value!r}."
            if self.ascending and not 0 < value[0] <= value[1]:
                return f"takes two numbers above 0 in ascending order, not {shown(tuple(value))}."
        elif get_origin(self.kind) is Literal:
            choices = get_args(self.kind)
            hint = nearest(str(value), choices)
            return "" if value in choices else f"takes {' or '.join(choices)}, not {value!r}.{hint}"
        elif type(value) is not self.kind:
            return f"takes {_KINDS[self.kind]}, not {value!r}."
        elif self.kind is float and not math.isfinite(value):
            return f"takes a finite number, not {value}."
        if value == self.default:  # it may stand for a value that follows from the rest
            return ""
        for number in numbers:
            if self.at_least is not None and number < self.at_least:
                return f"must be at least {self.at_least:g}, not {number}."
            if self.at_most is not None and number > self.at_most:
                return f"must be at most {self.at_most:g}, not {number}."
            if self.below is not None and number >= self.below:
                return f"must be below {self.below:g}, not {number}."
        return ""


def setting(default: Any, help: str, **declared: Any) -> Any:
    """Declare a field of the schema; `declared` are further fields of Setting."""
    return field(default=default, metadata={"setting": Setting(default=default, help=help, **declared)})


def keyword_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of --model-kwargs: NAME=VALUE, as a number, a tuple, ... or text."""
    found: dict[str, Any] = {}
    for name, equals, value in (word.partition("=") for word in text.split()):
        if not equals:
            raise UserError(f"--model-kwargs takes NAME=VALUE, such as drop_rate=0.1, not {name!r}.")
        try:
            found[name] = literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def shown(value: Any) -> str:
    """Return a default as a user types it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(shown, value)) or "empty"
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"
