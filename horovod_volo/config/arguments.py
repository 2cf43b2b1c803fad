"""The command-line parser of all commands, and the flags of settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import cache
from itertools import takewhile
from typing import Any, NoReturn

from horovod_volo.config.schema import all_settings
from horovod_volo.config.setting import Setting, shown
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import nearest

# Flags of timm, sail-sg/volo, TokenLabeling and torchrun that have no setting in their place; those
# that have one are declared with it. Flags that have one answer share a row.
_FOREIGN = {
    "--split-bn --bn-momentum --bn-eps --bn-tf --gp --head-init-scale --channels-last --pin-mem "
    "--no-prefetcher --use-multi-epochs-loader --fuser --worker-seeding --dataloader --synchronize-step "
    "--sched-on-updates --fast-norm --lr-base-scale": "It is not needed here, see docs/migration.md.",
    "--experiment --eval-metric": (
        "Results are in --output, in the folder --name; `best` is of the highest accuracy."
    ),
    "--drop --drop-block": "These networks have no dropout; stochastic depth is --drop-path.",
    "--mixup-mode --mixup-off-epoch --cutmix-minmax": (
        "Mixup and CutMix mix pairs of every batch: --mixup, --cutmix, --mixup-switch-prob."
    ),
    "--lr-cycle-mul --lr-cycle-limit --lr-noise --patience-epochs": (
        "The learning rate is a function of the step: --sched; --plugin registers your own."
    ),
    "--nproc-per-node --nnodes --node-rank --rdzv-backend --rdzv-endpoint --rdzv-id --master-addr "
    "--master-port --local-rank --world-size --dist-url --dist-backend --standalone": (
        "On one host it is --ranks N, or auto; on several, horovodrun -np RANKS -H HOST:GPUS,..."
    ),
    "--horovod-autotune --horovod-timeline": (
        "Set HOROVOD_AUTOTUNE=1 with HOROVOD_AUTOTUNE_LOG=FILE, or HOROVOD_TIMELINE=FILE, for all ranks."
    ),
    "--opt-eps --opt-betas --opt-kwargs --opt-args --opt-foreach": (
        "The optimizers' other constants are the published ones; --plugin registers your own."
    ),
    "--train-split --class-map --dataset --dataset-download": (
        "The data folder has train/ and val/; --val-split names another folder of held-out images."
    ),
    "--log-to --log-wandb --wandb-project --wandb-tags --wandb-resume-id": (
        "TensorBoard's events can be sent to a service, and so can a callback's metrics: docs/monitoring.md."
    ),
    "--data --data-dir --data-path": "The data folder is the first argument, without a flag.",
    "--max-restarts": "A job started again goes on with --resume auto; an --elastic run may lose hosts.",
    "--dist-bn": (
        "Batch norm over all ranks is --sync-bn all; checkpoints hold the average of its statistics."
    ),
    "--config -c": "A file of settings is --recipe FILE.toml; a run writes its own, resolved.toml.",
    "--no-aug": "No augmentation: --aa '' --color-jitter 0 --reprob 0 --scale 1 1 --ratio 1 1 --hflip 0.",
    "--tta --evaluate": "python -m horovod_volo.evaluate measures the accuracy.",
}


@cache
def hints() -> dict[str, str]:
    """Return what takes the place of other trainers' and launchers' flags that there are not."""
    found = {flag: answer for flags, answer in _FOREIGN.items() for flag in flags.split()}
    for setting in all_settings():
        value = setting.kind is not bool and setting.metavar
        usage = f"{setting.flag} {value}" if value else setting.flag
        found |= dict.fromkeys(setting.also, f"Here it is {usage}: {setting.help}.")
    return found


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations that raises its errors, so that one rank can print them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing on every rank."""
        message = message.removeprefix("argument ").replace(": takes", " takes", 1)
        command = self.prog[max(0, self.prog.find("python ")) :]
        all_flags = "--help-all" if "--help-all" in self._option_string_actions else "--help"
        raise UserError(f"{message[0].upper()}{message[1:]}. `{command} {all_flags}` lists all flags.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line; an argument that is not known raises UserError."""
        words = sys.argv[1:] if args is None else list(args)
        if self._subparsers is None:  # otherwise the flags are those of the command that follows
            # Before argparse looks for required arguments: a misspelled flag may be one of them.
            for word in takewhile(lambda word: word != "--", words):
                if word.startswith("--") and word.split("=")[0] not in self._option_string_actions:
                    self._refuse(word)
        known, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self._refuse(unknown[0])
        return known, unknown

    def _refuse(self, word: str) -> NoReturn:
        if word.startswith("-"):
            flag = word.split("=")[0]
            # torchrun has both spellings.
            answer = hints().get(flag.replace("_", "-"))
            hint = f" {answer}" if answer else nearest(flag, self._option_string_actions)
            raise UserError(f"There is no flag {flag}.{hint}")
        names = [str(action.metavar) for action in self._actions if not action.option_strings]
        raise UserError(
            f"{word!r} is one argument too many. Arguments without a flag: {', '.join(names) or 'none'}."
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise UserError if the value is not one of the choices."""
        if action.choices is not None and value not in action.choices:
            choices = list(map(str, action.choices))
            name = "/".join(action.option_strings) or action.metavar
            raise UserError(
                f"{name} takes {' or '.join(choices)}, not {value!r}.{nearest(str(value), choices)}"
            )


def whole_number(least: int, *, because: str = "") -> Callable[[str], int]:
    """Return an argparse type for whole numbers; `because` follows the bound in its message."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"takes a whole number of at least {least}, not {text!r}{because}"
            )
        return int(text)

    return read


AUTO = -1  # as a number of ranks: one for each GPU


def add_ranks(parser: argparse._ActionsContainer, help: str = "") -> None:
    """Add the flag of the ranks that a command starts on this host; 0: none."""

    def read(text: str) -> int:
        return AUTO if text == "auto" else whole_number(0, because="; or auto")(text)

    help = f"ranks to start on this host, without horovodrun; auto: one for each visible GPU, or 1{help}"
    parser.add_argument("--ranks", type=read, default=0, metavar="N", help=help)


class _Given(argparse.Action):
    """Stores the checked value of a setting; of a repeatable one all values, separated by commas."""

    def __init__(self, option_strings: list[str], dest: str, *, setting: Setting, **options: Any) -> None:
        super().__init__(option_strings, dest, metavar=setting.metavar, **options)
        self._setting = setting

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, _flag: Any = None) -> None:
        value = self._setting.from_text(values)
        earlier = getattr(namespace, self.dest, "") if self._setting.repeatable else ""
        setattr(namespace, self.dest, f"{earlier},{value}" if earlier else value)


def add_flag(parser: argparse._ActionsContainer, setting: Setting, *, required: bool = True) -> None:
    """Add the flag of a setting, which parsing leaves out if it is not given.

    `required` is about positional settings.
    """
    options: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS}
    help = setting.help.replace("%", "%%")
    if setting.positional:
        options["nargs"] = None if required else "?"
        parser.add_argument(action=_Given, setting=setting, help=help, **options)
        return
    help += f" (default: {shown(setting.default)})"
    if setting.kind is bool:
        parser.add_argument(*setting.flags, action=argparse.BooleanOptionalAction, help=help, **options)
    else:
        nargs = setting.count or None
        parser.add_argument(*setting.flags, action=_Given, setting=setting, nargs=nargs, help=help, **options)
    for flag, value in setting.shorthands.items():
        help = f"the same as {setting.flag} {value}"
        parser.add_argument(flag, action="store_const", const=value, help=help, **options)


def add_flags(parser: argparse._ActionsContainer, *settings: Setting) -> None:
    """Add the flags of settings, with their defaults."""
    for setting in settings:
        add_flag(parser, setting)
        # Not as the flag's own default: argparse would show it a second time in the help of a switch.
        parser.set_defaults(**{setting.name: setting.default})


def flags_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of parsed options by flag."""
    return {f"--{name.replace('_', '-')}": value for name, value in vars(options).items()}
