"""The command-line parser of all commands, and the flags of settings."""

import argparse
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any, NoReturn

from horovod_volo.config.setting import Setting, shown
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import nearest

_ALMOST = 0.81  # how similar a flag is that is suggested: a wrong one would change something else
_HIDDEN = argparse.SUPPRESS  # the help of flags that --help leaves out
# Flags of timm, sail-sg/volo, TokenLabeling and torchrun that mean something else here, or nothing; those
# with the meaning of a setting are declared with it. Flags that have one answer share a row.
_FOREIGN = {
    "--pretrained": "Weights that timm publishes are --finetune timm:NAME.",
    "--no-resume-opt": "--finetune takes the weights of a run without the state of its optimizer.",
    "--start-epoch": "A run continues at the step of its checkpoint: --resume.",
    "--validation-batch-size-multiplier": "--eval-batch-size is a number of images, not a factor.",
    "--nproc-per-node --nnodes --node-rank --rdzv-* --master-addr --master-port --local-rank --world-size "
    "--dist-url --dist-backend --standalone": (
        "On one host it is --ranks N, or auto; on several, horovodrun -np RANKS -H HOST:GPUS,..."
    ),
    "--horovod-autotune --horovod-timeline": (
        "Set HOROVOD_AUTOTUNE=1 with HOROVOD_AUTOTUNE_LOG=FILE, or HOROVOD_TIMELINE=FILE, for all ranks."
    ),
    "--train-split --class-map --dataset* -d": (
        "The data folder has train/ and val/; --val-split names another folder of held-out images."
    ),
    "--log-to --log-wandb --wandb-*": (
        "TensorBoard's events can be sent to a service, and so can a callback's metrics: docs/monitoring.md."
    ),
    "--max-restarts": "A job started again goes on with --resume auto; an --elastic run may lose hosts.",
    "--config -c": "A file of settings is --recipe FILE.toml; a run writes its own, resolved.toml.",
    "--no-aug": "No augmentation: --aa '' --color-jitter 0 --reprob 0 --scale 1 1 --ratio 1 1 --hflip 0.",
    "--interpolation --color-jitter-prob --lr-base-scale --log-dir": "docs/migration.md says what is here.",
    "--tta --evaluate": "`horovod-volo evaluate` measures the accuracy.",
}
# Flags that change nothing here; those with = take a value.
_WITHOUT_EFFECT = (
    "--pin-mem --no-pin-mem --channels-last --no-prefetcher --use-multi-epochs-loader --fast-norm --resplit "
    "--synchronize-step --no-ddp-bb --model-ema-force-cpu --save-images --worker-seeding= --fuser= "
    "--dist-bn= --patience-epochs= --lr-noise-pct= --lr-noise-std= --lr-cycle-decay= --amp-impl="
)


def hint(flag: str) -> str:
    """Return what takes the place of a flag of other trainers and launchers, or an empty string."""
    answers = {each: answer for flags, answer in _FOREIGN.items() for each in flags.split()}
    return next((answer for each, answer in answers.items() if fnmatchcase(flag, each)), "")


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations that raises its errors, so that one rank can print them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.stated = set[str]()  # the settings whose value the command line states

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing on every rank."""
        message = message.removeprefix("argument ").replace(": takes", " takes", 1)
        all_flags = "--help-all" if "--help-all" in self._option_string_actions else "--help"
        raise UserError(f"{message[0].upper()}{message[1:]}. `{self.prog} {all_flags}` lists all flags.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line; an argument that is not known raises UserError."""
        words = sys.argv[1:] if args is None else list(args)
        self.stated.clear()
        if self._subparsers is None:  # otherwise the flags are those of the command that follows
            # Before argparse looks for required arguments: a misspelled flag may be one of them.
            for number, word in enumerate(takewhile(lambda word: word != "--", words)):
                flag, equals, value = word.partition("=")
                if word.startswith("--") and flag not in self._option_string_actions:
                    flag = flag.replace("_", "-")  # torchrun has both spellings
                    if flag not in self._option_string_actions:
                        self._refuse(word)
                    words[number] = f"{flag}{equals}{value}"
        known, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self._refuse(unknown[0])
        return known, unknown

    def _refuse(self, word: str) -> NoReturn:
        if word.startswith("-"):
            flag = word.split("=")[0]
            answer = hint(flag.replace("_", "-"))
            known = [each for each, action in self._option_string_actions.items() if action.help != _HIDDEN]
            similar = nearest(flag, known, _ALMOST) if flag.startswith("--") else ""
            answer = answer or similar or "docs/migration.md lists the flags of other programs."
            raise UserError(f"There is no flag {flag}. {answer.lstrip()}")
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


def whole_number(least: int, *, because: str = "", **words: int) -> Callable[[str], int]:
    """Return an argparse type for whole numbers, and for words that stand for some.

    `because` follows the bound in its message.
    """
    because += "".join(f"; or {word}" for word in words)

    def read(text: str) -> int:
        if text not in words and (not text.isdecimal() or int(text) < least):
            raise argparse.ArgumentTypeError(
                f"takes a whole number of at least {least}, not {text!r}{because}"
            )
        return words[text] if text in words else int(text)

    return read


AUTO = -1  # as a number of ranks: one for each GPU


def add_ranks(parser: argparse._ActionsContainer, help: str = "") -> None:
    """Add the flag of the ranks that a command starts on this host; 0: none."""
    help = f"ranks to start on this host, without horovodrun; auto: one for each visible GPU, or 1{help}"
    parser.add_argument("--ranks", type=whole_number(0, auto=AUTO), default=0, metavar="N", help=help)


class _Given(argparse.Action):
    """Stores the checked value of a setting; of a repeatable or joined one all values."""

    def __init__(self, option_strings: list[str], dest: str, *, setting: Setting, **options: Any) -> None:
        super().__init__(option_strings, dest, metavar=setting.metavar, **options)
        self._setting = setting

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, _flag: Any = None) -> None:
        value = self._setting.from_text(values)
        parser.stated.add(self.dest)
        between = self._setting.joined or ("," if self._setting.repeatable else "")
        earlier = getattr(namespace, self.dest, "") if between else ""
        setattr(namespace, self.dest, f"{earlier}{between}{value}" if earlier else value)


class _Shorthand(argparse.Action):
    """Stores a fixed value of a setting, unless another flag states one: --model-ema --model-ema-decay X."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, *_: Any) -> None:
        if self.dest not in parser.stated:
            setattr(namespace, self.dest, self.const)


def add_flags_without_effect(parser: Parser) -> None:
    """Add the flags of other programs that change nothing here; parsing stores them under their own names."""
    options: dict[str, Any] = {"action": _Shorthand, "default": argparse.SUPPRESS, "help": _HIDDEN}
    for flag, value, _ in (each.partition("=") for each in _WITHOUT_EFFECT.split()):
        parser.add_argument(flag, dest=flag, nargs=None if value else 0, **options)


def add_flag(parser: argparse._ActionsContainer, setting: Setting, *, required: bool = True) -> None:
    """Add the flag of a setting, which parsing leaves out if it is not given.

    `required` is about positional settings.
    """
    options: dict[str, Any] = {"dest": setting.name, "default": argparse.SUPPRESS}
    help = setting.help.replace("%", "%%")
    given = {"action": _Given, "setting": setting, **options}
    if setting.positional:
        parser.add_argument(nargs=None if required else "?", help=help, **given)
        if required:  # argparse would miss it where a flag gives it
            return
    else:
        help += f" (default: {shown(setting.default)})"
        given["nargs"] = setting.count or ("?" if setting.bare else "+" if setting.joined else None)
        given["const"] = setting.bare or None
        if setting.kind is bool:
            given = {"action": argparse.BooleanOptionalAction, **options}
        parser.add_argument(*setting.flags, help=help, **given)
    for flag, _, value in (each.partition("=") for each in setting.also):
        if "{}" in value:  # an argument of the network
            parser.add_argument(flag, help=_HIDDEN, **given | {"nargs": None, "type": value.format})
        elif value or setting.kind is bool:
            const = setting.from_text(value) if value else True
            parser.add_argument(flag, action=_Shorthand, nargs=0, const=const, help=_HIDDEN, **options)
        else:
            count = {"nargs": 3} if flag == "--input-size" else {}
            parser.add_argument(flag, help=_HIDDEN, **given | count)


def add_flags(parser: argparse._ActionsContainer, *settings: Setting) -> None:
    """Add the flags of settings, with their defaults."""
    for setting in settings:
        add_flag(parser, setting)
        # Not as the flag's own default: argparse would show it a second time in the help of a switch.
        parser.set_defaults(**{setting.name: setting.default})


def flags_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the values of parsed options by flag."""
    return {f"--{name.replace('_', '-')}": value for name, value in vars(options).items()}
