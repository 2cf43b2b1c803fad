"""Recipes: TOML files with one table per group of settings. The resolved.toml of a run is one too.

The table [published] of a recipe holds its published result, and the settings that result needs.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from horovod_volo.config.schema import Config, Model, Published, all_settings, group_types
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import nearest

RECIPES = Path(__file__).parent / "recipes"

# Keys that moved to another table: they are read from both.
_MOVED = {("exchange", "precision"): "model"}
# Keys that were removed, with the value that changes nothing: the resolved.toml of an earlier run has all.
_REMOVED: dict[str, dict[str, Any]] = {
    "launch": {"horovod_autotune": "", "horovod_timeline": ""},
    "logging": {"histograms_every": 0, "log_to": ""},
    "model": {"grad_checkpoint_stages": "all"},
    "objective": {"class_weights": ""},
    "update": {"cycle_up": 0.45, "cycle_start": 0.04},
    "segmentation": {"neck": "lvvit", "auxiliary_weight": 0.4, "mask_resize": "centre"},
    "detection": {"keep_empty": False, "crop_sides": [0.3, 1.0], "saturation_range": [0.5, 1.5]}
    | {"contrast_range": [0.5, 1.5], "brightness_range": [0.875, 1.125]}
    | {"min_score": 0.05, "max_overlap": 0.5, "most_boxes": 200},
}


def recipe_names() -> list[str]:
    """Return the names of the package's recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load_recipe(name_or_path: str) -> dict[str, Any]:
    """Return the checked values of a recipe by setting name; the recipe is a name or a path."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = RECIPES / f"{name_or_path}.toml"
        if not path.is_file():
            hint = nearest(name_or_path, recipe_names())
            raise UserError(
                f"There is no recipe {name_or_path!r}.{hint} Recipes: {', '.join(recipe_names())}. One of "
                "your own is a file NAME.toml, which --dry-run prints for the settings of other flags."
            )
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Recipe {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"Recipe {path} is not valid TOML: {error}.") from None
    return _flatten(tables, path)


def _flatten(tables: dict[str, Any], path: Path) -> dict[str, Any]:
    settings = {(setting.group, setting.name): setting for setting in all_settings()}
    tables_known = [*group_types(), "published"]
    chosen: dict[str, Any] = {}
    for group, table in tables.items():
        if group not in tables_known or not isinstance(table, dict):
            hint = nearest(group, tables_known)
            raise UserError(
                f"Recipe {path} has an unknown table [{group}].{hint} Tables: {', '.join(tables_known)}."
            )
        if group == "published":
            chosen[group] = _published(table, path)
            continue
        for key, value in table.items():
            if key in _REMOVED.get(group, {}):
                if value != _REMOVED[group][key]:
                    chosen["warnings"] = (*chosen.get("warnings", ()), _unused(group, key, path))
                continue
            home = _MOVED.get((group, key), group)
            if (home, key) not in settings:
                raise UserError(f"Recipe {path} has an unknown key {key!r} in [{group}].{_where(key)}")
            if home == group or key not in tables.get(home, {}):
                chosen[key] = settings[home, key].checked(value, f"Recipe {path}: {group}.{key}")
    # Recipes older than lr_base_size: only the peak is scaled, the other two learning rates are not.
    if {"lr_base", "min_lr", "warmup_lr"} & chosen.keys():
        chosen.setdefault("lr_base_size", 0)
    return chosen


def _unused(group: str, key: str, path: Path) -> str:
    """Return a warning about a removed key that was used; raise UserError if results depend on it."""
    if group in ("launch", "logging"):
        return f"recipe {path}: {key} is no setting any more, and has no effect"
    raise UserError(
        f"Recipe {path} has an unknown key {key!r} in [{group}]. It is no setting any more, and may only be "
        f"{_REMOVED[group][key]!r}."
    )


def _published(table: dict[str, Any], path: Path) -> Published:
    names = [setting.name for setting in all_settings()]
    top1, needs = table.get("top1", 0.0), table.get("needs", [])
    known = table.keys() <= {"top1", "needs"} and type(top1) in (int, float)
    if not known or not isinstance(needs, list) or not all(need in names for need in needs):
        raise UserError(f"Recipe {path}: [published] takes top1, a number, and needs, names of settings.")
    return Published(float(top1), tuple(needs))


def _where(key: str) -> str:
    homes = {setting.name: setting.group for setting in all_settings()}
    return f" It belongs to [{homes[key]}]." if key in homes else nearest(key, homes)


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


def dump(config: Config) -> str:
    """Return all settings as the text of a recipe, in the schema's order."""
    tables = [*group_types(), *(["published"] if config.published != Published() else [])]
    return "\n".join(f"[{table}]\n{_lines(vars(getattr(config, table)))}" for table in tables)


def with_absolute_folder(config: Config) -> Config:
    """Return settings whose data folder is the same in every working directory."""
    folder = config.data.data_dir
    absolute = folder if not folder or "://" in folder else str(Path(folder).absolute())
    return replace(config, data=replace(config.data, data_dir=absolute))


def _lines(values: dict[str, Any]) -> str:
    # JSON's literals are TOML's, but JSON does not escape U+007F, which TOML requires.
    literals = {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}
    return "".join(f"{key} = {text}\n" for key, text in literals.items()).replace("\x7f", "\\u007f")
