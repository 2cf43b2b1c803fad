"""Parts that the command lines of several tools share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from horovod_volo.config.values import all_settings, from_text, metavar, shown
from horovod_volo.core.errors import UserError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its errors, so that one rank can print them for all."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing on every rank."""
        command = self.prog[max(0, self.prog.find("python ")) :]
        raise UserError(f"{message}. `{command} --help` lists all flags.")


def whole_number(least: int, most: int | None = None, *, because: str = "") -> Callable[[str], int]:
    """Return an argparse type for whole numbers; `because` follows the bounds in its message."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least or (most is not None and int(text) > most):
            raise argparse.ArgumentTypeError(f"takes a whole number {bounds}, not {text!r}{because}")
        return int(text)

    return read


def add_choice_of_weights(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose between raw and EMA weights, and the heads of evaluation."""
    parser.add_argument(
        "--use-ema",
        "--averaged",
        action="store_true",
        help="load the EMA weights instead of the raw ones",
    )
    parser.add_argument(
        "--aux-head",
        choices=("auto", "on", "off"),
        default="auto",
        help="VOLO and LV-ViT: on adds half of the highest token logit to the class logit, off does not; "
        "auto: on if the auxiliary head was trained (%(default)s)",
    )


class Join(argparse.Action):
    """A flag that may be repeated: its values become one text, separated by commas."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002
    ) -> None:
        """Append one value."""
        earlier = getattr(namespace, self.dest, "")
        setattr(namespace, self.dest, f"{earlier},{values}" if earlier else values)


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
            action=Join if setting.repeatable else "store",
            type=partial(from_text, setting),
            default=default,
            metavar=metavar(setting),
            help=f"{help} (default: {shown(default)})",
        )
