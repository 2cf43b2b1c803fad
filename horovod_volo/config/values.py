"""The schema's settings as a list, and the checks and conversions of their values."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from horovod_volo.config.schema import Config, Model, Published
from horovod_volo.config.setting import Setting
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import nearest

_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_PAIR, _CHANNELS = 2, 3  # tuple[float, float]: low and high; tuple[float, ...]: red, green and blue, or none


def group_types() -> dict[str, type]:
    """Return the groups of settings by name, in the order of --help."""
    tables = {name: type(value) for name, value in vars(Config()).items() if is_dataclass(value)}
    del tables["published"]
    return tables


@cache
def all_settings() -> tuple[Setting, ...]:
    """Return every setting of the schema, in its order."""
    found = []
    for group, table in group_types().items():
        hints = get_type_hints(table, include_extras=True)
        idle = Config.__dataclass_fields__[group].metadata.get("idle", ())
        for entry in fields(table):
            kind, bounds = hints[entry.name], {}
            if get_origin(kind) is Annotated:
                (bounds,), kind = kind.__metadata__, kind.__origin__
            item = replace(entry.metadata["setting"], name=entry.name, kind=kind, group=group, **bounds)
            found.append(replace(item, idle=(*idle, *item.idle)))
    return tuple(found)


def by_flag(config: Config) -> dict[str, Any]:
    """Return the value of every setting by its flag."""
    return {setting.flag: setting.value_in(config) for setting in all_settings()}


def setting_of_training(name: str, **changes: Any) -> Setting:
    """Return a setting of the schema, for another command; `changes` replace fields of Setting."""
    return next(replace(setting, **changes) for setting in all_settings() if setting.name == name)


def from_text(setting: Setting, given: str | list[str]) -> Any:
    """Convert and check a command-line value; that of several numbers is a list of texts."""
    value: Any = given
    if count_of(setting):
        value = [_number(float, text, setting.flag) for text in given]
    elif setting.kind in (int, float):
        value = _number(setting.kind, str(given), setting.flag)
    return checked(setting, value, setting.flag)


def _number(kind: Any, text: str, where: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UserError(f"{where} takes {_KINDS[kind]}, not {text!r}.") from None


def checked(setting: Setting, value: Any, where: str) -> Any:
    """Return `value` in the setting's type, or raise UserError; a whole number is accepted for a float."""
    if setting.kind is float and type(value) is int:
        value = float(value)
    if problem := _problem(setting, value):
        raise UserError(f"{where} {problem}")
    return tuple(map(float, value)) if count_of(setting) else value


def checked_by_name(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the names of their settings, checked; raise UserError for a name that there is not."""
    settings = {setting.name: setting for setting in all_settings()}
    for name in given:
        if name not in settings:
            raise UserError(f"There is no setting {name!r}.{nearest(name, settings)}")
    plain = {name: os.fspath(each) if isinstance(each, os.PathLike) else each for name, each in given.items()}
    return {name: checked(settings[name], value, name) for name, value in plain.items()}


def _problem(setting: Setting, value: Any) -> str:
    """Return what the value must be instead, or an empty string."""
    count = count_of(setting)
    numbers = value if count and isinstance(value, list | tuple) else (value,)
    if count:
        if not numbers and not setting.default:
            return ""
        if len(numbers) != count or not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
            return f"takes {'two' if count == _PAIR else 'three'} numbers, not {value!r}."
        if setting.ascending and not 0 < value[0] <= value[1]:
            return f"takes two numbers above 0 in ascending order, not {shown(tuple(value))}."
    elif get_origin(setting.kind) is Literal:
        choices = get_args(setting.kind)
        hint = nearest(str(value), choices)
        return "" if value in choices else f"takes {' or '.join(choices)}, not {value!r}.{hint}"
    elif type(value) is not setting.kind:
        return f"takes {_KINDS[setting.kind]}, not {value!r}."
    elif setting.kind is float and not math.isfinite(value):
        return f"takes a finite number, not {value}."
    if value == setting.default:  # it may stand for a value that follows from the rest
        return ""
    for number in numbers:
        if setting.at_least is not None and number < setting.at_least:
            return f"must be at least {setting.at_least:g}, not {number}."
        if setting.at_most is not None and number > setting.at_most:
            return f"must be at most {setting.at_most:g}, not {number}."
        if setting.below is not None and number >= setting.below:
            return f"must be below {setting.below:g}, not {number}."
    return ""


def assemble(chosen: Mapping[str, Any], *, fallback_name: str) -> Config:
    """Build a configuration of checked values by name; an unnamed run is named after its recipe or model."""
    name = chosen.get("name") or Path(fallback_name).stem or chosen.get("model", Model.model)
    groups = {
        group: table(**{key: value for key, value in {**chosen, "name": name}.items() if key in known})
        for group, table in group_types().items()
        for known in ({entry.name for entry in fields(table)},)
    }
    return Config(
        **groups, published=chosen.get("published", Published()), warnings=chosen.get("warnings", ())
    )


def shown(value: Any) -> str:
    """Return a default as a user types it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(shown, value)) or "empty"
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"


def metavar(setting: Setting) -> str | tuple[str, ...]:
    """Return the placeholder of the value in --help: its choices, or its type."""
    if setting.positional:
        return setting.flag
    if get_origin(setting.kind) is Literal:
        return "{" + ",".join(get_args(setting.kind)) + "}"
    if count := count_of(setting):
        return ("LOW", "HIGH") if count == _PAIR else ("RED", "GREEN", "BLUE")
    return {int: "N", float: "X"}.get(setting.kind, "TEXT")


def count_of(setting: Setting) -> int:
    """Return how many numbers the setting is: two or three; 0: it is none of these."""
    if get_origin(setting.kind) is not tuple:
        return 0
    return _CHANNELS if Ellipsis in get_args(setting.kind) else _PAIR
