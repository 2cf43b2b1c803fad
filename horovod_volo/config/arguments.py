"""What the tools' command lines have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn, get_args

from horovod_volo.config.values import all_settings, from_text, metavar, shown
from horovod_volo.core.errors import UserError


class Parser(argparse.ArgumentParser):
    """A command line whose mistakes can be said by one rank for all."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong, instead of printing it on every rank."""
        command = self.prog[max(0, self.prog.find("python ")) :]
        raise UserError(f"{message}. `{command} --help` tells every flag.")


def whole_number(least: int, most: int | None = None, *, because: str = "") -> Callable[[str], int]:
    """Return what argparse reads a whole number with; `because` follows the bounds in its message."""
    bounds = f"from {least} on" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"takes a whole number {bounds}, not {text!r}{because}")
        return int(text)

    return read


def add_choice_of_weights(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which weights of a place are taken, and which of their heads."""
    parser.add_argument(
        "--use-ema",
        "--averaged",
        action="store_true",
        help="where raw and averaged weights lie together, take the averaged ones",
    )
    parser.add_argument(
        "--aux-head",
        choices=("auto", "on", "off"),
        default="auto",
        help="of VOLO and LV-ViT: add half the best token's logit, or go by the class token alone; auto: add "
        "it where the auxiliary head was trained",
    )


def add_binding(parser: argparse.ArgumentParser) -> None:
    """Add the flag that says how ranks are bound to their host; the trainer has it as a setting."""
    binding = next(setting for setting in all_settings() if setting.name == "binding")
    modes = get_args(binding.kind)
    parser.add_argument(
        "--binding", choices=modes, default=binding.default, help="as for training (%(default)s)"
    )


def add_shared_settings(
    parser: argparse.ArgumentParser,
    names: Iterable[str],
    *,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    helps: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add settings of training to another command, with the schema's flags, defaults, checks and messages.

    `defaults` and `helps` replace those of the schema by name. A positional setting is required.
    """
    settings = {setting.name: setting for setting in all_settings()}
    for name in names:
        setting = settings[name]
        help = helps.get(name, setting.help).replace("%", "%%")
        if setting.positional:
            parser.add_argument(name, metavar=metavar(setting), help=help)
            continue
        default = defaults.get(name, setting.default)
        parser.add_argument(
            *setting.flags,
            dest=name,
            type=partial(from_text, setting),
            default=default,
            metavar=metavar(setting),
            help=f"{help} (default: {shown(default)})",
        )
