"""From an argument list to a request: default < recipe < flag, and without a recipe default < family < flag.

The parser is built from the schema; nothing here knows a setting by name.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import NoReturn

from horovod_volo.config import values
from horovod_volo.config.published_defaults import published_defaults, told_defaults
from horovod_volo.config.recipe import load_recipe, recipe_names
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import check, check_flags
from horovod_volo.config.values import Setting
from horovod_volo.core.errors import UserError


@dataclass(frozen=True)
class Request:
    """What the user asked for: a configuration, and whether to run it or only to tell about it."""

    config: Config
    dry_run: bool
    ranks: int  # for a dry run; 0: as many as the launcher started


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}. `--help` lists every flag.")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser: one group of flags for each group of settings."""
    parser = _Parser(
        prog="python -m horovod_volo.train",
        usage="horovodrun -np RANKS python -m horovod_volo.train DATA_DIR [--recipe NAME] [flags]",
        description="Train VOLO on a folder of images, one process per GPU (or per CPU share).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--recipe", default="", help=f"file of settings, or one of: {', '.join(recipe_names())}"
    )
    parser.add_argument("--dry-run", action="store_true", help="tell what would run, and stop")
    parser.add_argument(
        "--ranks", type=int, default=0, help="with --dry-run: as if started on this many ranks"
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for setting in values.all_settings():
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group_title)
        _add(groups[setting.group], setting)
    return parser


def _add(group: argparse._ArgumentGroup, setting: Setting) -> None:
    shown = f"{setting.help}{told_defaults(setting.name)} (default: {values.shown(setting.default)})"
    shown = shown.replace("%", "%%")
    metavar = values.metavar(setting)
    absent = argparse.SUPPRESS
    if setting.positional:
        group.add_argument(setting.name, nargs="?", metavar=metavar, default=absent, help=setting.help)
    elif setting.kind is bool:
        action = argparse.BooleanOptionalAction
        group.add_argument(*setting.flags, dest=setting.name, action=action, default=absent, help=shown)
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


def parse(argv: list[str]) -> Request:
    """Read a command line; `--help` prints and exits."""
    parser = build_parser()
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(_unknown_argument(unknown[0], parser))
    if given.ranks and not given.dry_run:
        raise UserError(
            "--ranks goes with --dry-run. A real run's ranks come from `horovodrun -np` or `mpirun -np`."
        )
    if given.ranks < 0:
        raise UserError(f"--ranks must be at least 1, not {given.ranks}.")
    flags = {
        setting.name: values.from_text(setting, getattr(given, setting.name))
        for setting in values.all_settings()
        if hasattr(given, setting.name)
    }
    below = load_recipe(given.recipe) if given.recipe else published_defaults(flags)
    config = values.assemble({**below, **flags}, fallback_name=given.recipe)
    check(config)
    check_flags(flags, config)
    return Request(config=config, dry_run=given.dry_run, ranks=given.ranks)


def _unknown_argument(argument: str, parser: argparse.ArgumentParser) -> str:
    if not argument.startswith("-"):
        return f"{argument!r} is one argument too many: only the data folder stands without a flag."
    flag = argument.split("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    return f"There is no flag {flag}.{values.nearest(flag, known)}"
