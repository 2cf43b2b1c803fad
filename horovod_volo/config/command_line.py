"""Parses the command line into a configuration: a flag overrides the recipe, which overrides the defaults.

Without a recipe, the defaults of the model's family override the schema's, of which the parser is built.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from horovod_volo.config import values
from horovod_volo.config.arguments import Join
from horovod_volo.config.recipe import load_recipe, recipe_names
from horovod_volo.config.schema import Config, Model
from horovod_volo.config.validation import check, check_flags, settings_without_effect
from horovod_volo.config.values import Setting
from horovod_volo.core.errors import UserError

# Defaults of a family whose published main.py differs from VOLO's, which the schema follows. They apply
# without a recipe only; tests/published/test_defaults.py compares both, docs/training.md lists deviations.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "lvvit_": {"batch_size": 32, "warmup_epochs": 5, "dense_weight": 1.0},
}


@dataclass(frozen=True)
class Request:
    """A parsed command line: the configuration, and whether to run it or only to describe it."""

    config: Config
    dry_run: bool
    ranks: int  # of a dry run; 0: those that the launcher started


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}. `--help` lists all flags.")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser, with one argument group per group of settings."""
    parser = _Parser(
        prog="python -m horovod_volo.train",
        usage="horovodrun -np RANKS python -m horovod_volo.train DATA_DIR [--recipe NAME] [flags]",
        description="Train VOLO on a folder of images, with one process per GPU.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--recipe", default="", help=f"TOML file of settings, or one of: {', '.join(recipe_names())}"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print settings, batch, steps, memory and traffic, and stop"
    )
    parser.add_argument("--ranks", type=int, default=0, help="number of ranks to assume with --dry-run")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in values.all_settings():
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group_title)
        _add(groups[setting.group], setting)
    return parser


def _add(group: argparse._ArgumentGroup, setting: Setting) -> None:
    shown = f"{setting.help}{_family_defaults(setting.name)} (default: {values.shown(setting.default)})"
    shown = shown.replace("%", "%%")
    metavar = values.metavar(setting)
    absent = argparse.SUPPRESS
    if setting.positional:
        group.add_argument(setting.name, nargs="?", metavar=metavar, default=absent, help=setting.help)
    elif setting.kind is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(*setting.flags, dest=setting.name, action=action, default=absent, help=shown)
    elif setting.repeatable:
        group.add_argument(
            *setting.flags, dest=setting.name, action=Join, metavar=metavar, default=absent, help=shown
        )
    else:
        count = len(metavar) if isinstance(metavar, tuple) else None
        group.add_argument(
            *setting.flags, dest=setting.name, nargs=count, metavar=metavar, default=absent, help=shown
        )
    for flag, value in setting.shorthands.items():
        group.add_argument(
            flag,
            dest=setting.name,
            action="store_const",
            const=value,
            default=absent,
            help=f"the same as {setting.flags[0]} {value}",
        )


def published_defaults(flags: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the published defaults of the chosen model's family that differ from the schema's."""
    model = flags.get("model", Model.model)
    return next((own for family, own in FAMILIES.items() if model.startswith(family)), {})


def _family_defaults(setting: str) -> str:
    """Return the part of a help line that lists other defaults of families."""
    own = {family: defaults[setting] for family, defaults in FAMILIES.items() if setting in defaults}
    return "".join(f"; {family}* without a recipe: {value}" for family, value in own.items())


def parse(argv: list[str]) -> Request:
    """Parse a command line; `--help` prints and exits."""
    parser = build_parser()
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(_unknown_argument(unknown[0], parser))
    if given.ranks and not given.dry_run:
        raise UserError(
            "--ranks goes with --dry-run. A real run gets its ranks from `horovodrun -np` or `mpirun -np`."
        )
    if given.ranks < 0:
        raise UserError(f"--ranks must be at least 1, not {given.ranks}.")
    flags = {
        setting.name: values.from_text(setting, getattr(given, setting.name))
        for setting in values.all_settings()
        if hasattr(given, setting.name)
    }
    recipe = load_recipe(given.recipe) if given.recipe else {}
    below = recipe if given.recipe else published_defaults(flags)
    config = values.assemble({**below, **flags}, fallback_name=given.recipe)
    check(config)
    check_flags(flags, config)
    # resolved.toml states every setting: one that has its default value was not chosen.
    by_recipe = {
        item.name for item in values.all_settings() if recipe.get(item.name, item.default) != item.default
    }
    idle = settings_without_effect(config, {*flags, *by_recipe})
    config = replace(config, warnings=(*config.warnings, *idle))
    return Request(config=config, dry_run=given.dry_run, ranks=given.ranks)


def _unknown_argument(argument: str, parser: argparse.ArgumentParser) -> str:
    if not argument.startswith("-"):
        return f"{argument!r} is one argument too many: only the data folder is given without a flag."
    flag = argument.split("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    return f"There is no flag {flag}.{values.nearest(flag, known)}"
