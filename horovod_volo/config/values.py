"""The schema's settings as a list, and the checks and conversions of their values."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from horovod_volo.config.schema import Config, Published, group_types
from horovod_volo.core.errors import UserError


@dataclass(frozen=True)
class Setting:
    """One field of the schema."""

    group: str
    group_title: str
    name: str
    kind: Any  # bool, int, float, str, tuple[float, float] or a Literal
    default: Any
    help: str
    flags: tuple[str, ...]
    shorthands: Mapping[str, Any]
    at_least: float | None
    below: float | None
    positional: bool
    repeatable: bool


@cache
def all_settings() -> tuple[Setting, ...]:
    """Return every setting of the schema, in its order."""
    found = []
    for group, kind in group_types().items():
        hints = get_type_hints(kind)
        for entry in fields(kind):
            if entry.default is MISSING:
                raise TypeError(f"setting {entry.name} has no default")
            details = dict(entry.metadata)
            spelled = "--" + entry.name.replace("_", "-")
            flags = (*(flag for flag in details.pop("flags") if flag[1] != "-"), spelled)
            flags += tuple(flag for flag in entry.metadata["flags"] if flag.startswith("--"))
            title = (kind.__doc__ or group).strip()
            found.append(
                Setting(group, title, entry.name, hints[entry.name], entry.default, flags=flags, **details)
            )
    return tuple(found)


def from_text(setting: Setting, given: Any) -> Any:
    """Convert a command-line value: text, a list of texts, or the constant of a shorthand."""
    where = "DATA_DIR" if setting.positional else setting.flags[-1 if len(setting.flags[0]) == 2 else 0]
    if setting.kind in (int, float) and isinstance(given, str):
        return checked(setting, _number(setting.kind, given, where), where)
    if _is_pair(setting) and isinstance(given, list):
        return checked(setting, [_number(float, text, where) for text in given], where)
    return checked(setting, given, where)


def _number(kind: Any, text: str, where: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{where} takes {_described(kind)}, not {text!r}.") from None


def checked(setting: Setting, value: Any, where: str) -> Any:
    """Return `value` in the setting's type, or raise UserError; a whole number is accepted for a float."""
    if setting.kind is float and type(value) is int:
        value = float(value)
    if _is_pair(setting):
        if not (
            isinstance(value, list | tuple)
            and len(value) == 2
            and all(type(v) in (int, float) and math.isfinite(v) for v in value)
        ):
            raise UserError(f"{where} takes two numbers, not {value!r}.")
        return (float(value[0]), float(value[1]))
    if get_origin(setting.kind) is Literal:
        choices = get_args(setting.kind)
        if value not in choices:
            raise UserError(
                f"{where} takes {' or '.join(choices)}, not {value!r}.{nearest(str(value), choices)}"
            )
        return value
    if type(value) is not setting.kind:
        raise UserError(f"{where} takes {_described(setting.kind)}, not {value!r}.")
    _check_range(setting, value, where)
    return value


def _check_range(setting: Setting, value: Any, where: str) -> None:
    if setting.kind is float and not math.isfinite(value):
        raise UserError(f"{where} takes a finite number, not {value}.")
    if setting.at_least is not None and not value >= setting.at_least:
        raise UserError(f"{where} must be at least {setting.at_least:g}, not {value}.")
    if setting.below is not None and not value < setting.below:
        raise UserError(f"{where} must be below {setting.below:g}, not {value}.")


def assemble(chosen: Mapping[str, Any], *, fallback_name: str) -> Config:
    """Build a configuration of checked values by name; an unnamed run is named after its recipe or model."""
    groups = {
        group: kind(**{f.name: chosen[f.name] for f in fields(kind) if f.name in chosen})
        for group, kind in group_types().items()
    }
    if not groups["run"].name:
        name = Path(fallback_name).stem if fallback_name else groups["model"].model
        groups["run"] = type(groups["run"])(**{**vars(groups["run"]), "name": name})
    return Config(
        **groups, published=chosen.get("published", Published()), warnings=chosen.get("warnings", ())
    )


def nearest(wrong: str, known: Iterable[str]) -> str:
    """Return " Did you mean X?", or an empty string if no known name is similar."""
    match = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.6)
    return f" Did you mean {match[0]}?" if match else ""


def shown(value: Any) -> str:
    """Return a default as a user types it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(f"{part:g}" for part in value)
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if value != "" else "empty"


def metavar(setting: Setting) -> str | tuple[str, ...]:
    """Return the placeholder of the value in --help: its choices, or its type."""
    if setting.positional:
        return "DATA_DIR"
    if get_origin(setting.kind) is Literal:
        return "{" + ",".join(get_args(setting.kind)) + "}"
    if _is_pair(setting):
        return ("LOW", "HIGH")
    return {int: "N", float: "X"}.get(setting.kind, "TEXT")


def _is_pair(setting: Setting) -> bool:
    return get_origin(setting.kind) is tuple


def _described(kind: Any) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]
