"""Recipes: TOML files with one table a group of settings. A run's resolved settings are one too."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from horovod_volo.config import values
from horovod_volo.config.errors import UserError
from horovod_volo.config.schema import Config

RECIPES = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(name_or_path: str) -> dict[str, Any]:
    """Read a recipe by name or path into checked values by setting name."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = RECIPES / f"{name_or_path}.toml"
        if not path.is_file():
            hint = values.nearest(name_or_path, recipe_names())
            raise UserError(
                f"There is no recipe {name_or_path!r}.{hint} Recipes: {', '.join(recipe_names())}."
            )
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Recipe {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"Recipe {path} is not valid TOML: {error}.") from None
    return _flatten(tables, path)


def _flatten(tables: dict[str, Any], path: Path) -> dict[str, Any]:
    settings = values.all_settings()
    groups = list(dict.fromkeys(setting.group for setting in settings))
    chosen: dict[str, Any] = {}
    for group, table in tables.items():
        if group not in groups or not isinstance(table, dict):
            hint = values.nearest(group, groups)
            raise UserError(
                f"Recipe {path} has an unknown table [{group}].{hint} Tables: {', '.join(groups)}."
            )
        known = {setting.name: setting for setting in settings if setting.group == group}
        for key, value in table.items():
            if key not in known:
                raise UserError(
                    f"Recipe {path} has an unknown key {key!r} in [{group}].{_where(key, settings)}"
                )
            chosen[key] = values.checked(known[key], value, f"Recipe {path}: {group}.{key}")
    return chosen


def _where(key: str, settings: tuple[values.Setting, ...]) -> str:
    homes = {setting.name: setting.group for setting in settings}
    if key in homes:
        return f" It belongs to [{homes[key]}]."
    return values.nearest(key, homes)


def dump(config: Config) -> str:
    """Write every setting as a recipe, in the schema's order."""
    lines: list[str] = []
    group = ""
    for setting in values.all_settings():
        if setting.group != group:
            group = setting.group
            lines += ["", f"[{group}]"] if lines else [f"[{group}]"]
        lines.append(f"{setting.name} = {_literal(getattr(getattr(config, group), setting.name))}")
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(repr, value))}]"
    if isinstance(value, str):
        # JSON's escapes are TOML's, but JSON lets one control character through that TOML does not.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
