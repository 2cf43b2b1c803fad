"""Parses the command line into a configuration: a flag overrides the recipe, which overrides the defaults.

Without a recipe, the defaults of the model's family override the schema's, of which the parser is built.
"""

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from horovod_volo.config.arguments import Parser, add_flag, add_flags_without_effect, add_ranks
from horovod_volo.config.recipe import assemble, load_recipe, recipe_names
from horovod_volo.config.schema import Config, Model, Run, all_settings, group_types
from horovod_volo.config.setting import shown
from horovod_volo.config.update_settings import Update
from horovod_volo.config.validation import check
from horovod_volo.core.errors import UserError

# Where defaults of a family, by the beginning of its names, differ from those of VOLO's published main.py,
# which the schema follows. They apply without a recipe only; docs/training.md lists deviations.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "volo": {},
    "lvvit_": {"batch_size": 32, "warmup_epochs": 5, "dense_weight": 1.0},
    "": {"cooldown_epochs": 0},  # all others, as in timm
}


class Request(NamedTuple):
    """A parsed command line: the configuration, and whether to run it or only to describe it."""

    config: Config
    dry_run: bool
    ranks: int  # to start, or of a dry run; 0: those that a launcher has started


_USUAL = {
    *("data_dir", "recipe", "model", "img_size", "epochs", "batch_size", "global_batch", "lr", "precision"),
    *("ranks", "token_label_data", "finetune", "output", "name", "resume", "val_split"),
}
_EXAMPLES = """These are the usual flags; --help-all lists all, and --dry-run prints what a run would do.

examples:
  horovod-volo train FOLDER                        folders of classes: the rest is chosen, and said
  horovod-volo train FOLDER --ranks auto --epochs 10 --resume auto
  horovod-volo train FOLDER --recipe volo_d1 --dry-run --ranks 40
  horovodrun -np 8 horovod-volo train FOLDER --recipe volo_d1 --token-label-data LABELS
"""


class _Help(argparse.Action):
    """Prints all flags, or the usual ones and examples, with the values that this command line has."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, _: Any, flag: Any = None) -> None:
        _show_values(parser, namespace)
        if flag != "--help-all":
            for action in parser._actions:
                if action.dest not in _USUAL or action.nargs == 0:
                    action.help = argparse.SUPPRESS
            parser.epilog = _EXAMPLES
        parser.print_help()
        parser.exit()


def settings_chosen() -> set[str]:
    """Return what a run without a model and a recipe chooses (engine/open_settings.py), or names."""
    of_recipes = load_recipe("finetune_folder") | load_recipe("fast_small")
    return {"name", "fit_head", "freeze", "model_kwargs", *of_recipes} - {"first_size", "global_batch"}


def _show_values(parser: Parser, namespace: argparse.Namespace) -> None:
    """Replace the defaults in the help by the values of a run with this recipe and these flags."""
    given = {item.name: getattr(namespace, item.name) for item in all_settings() if item.name in namespace}
    try:
        config = build_config(namespace.recipe, given)
    except UserError:  # which the help may help to correct
        config, given = build_config(namespace.recipe, {}), {}
    chosen = settings_chosen() - config.explicit if config.chooses_model else set()
    for item in all_settings():
        value = "chosen" if item.name in chosen else shown(item.value_in(config)).replace("%", "%%")
        for action in parser._actions:
            text, found, _ = (action.help or "").rpartition(" (default: ")
            if action.dest == item.name and found:
                action.help = f"{text} ({'given' if item.name in given else 'default'}: {value})"


def build_parser() -> Parser:
    """Build the parser, with one argument group per group of settings."""
    parser = Parser(
        prog="horovod-volo train",
        usage="[horovodrun -np RANKS] horovod-volo train DATA_DIR [--recipe NAME] [flags]",
        description="Train VOLO on a folder of images, with one process per GPU. Flags of timm that mean the "
        "same are accepted too.",
        add_help=False,
    )
    add = parser.add_argument
    add("-h", "--help", nargs=0, action=_Help, help="print the usual flags and examples")
    add("--help-all", nargs=0, action=_Help, help="print all flags")
    add("--recipe", default="", help=f"TOML file of settings, or one of: {', '.join(recipe_names())}")
    add("--dry-run", action="store_true", help="print settings, batch, steps, memory and traffic, and stop")
    add_ranks(parser, "; with --dry-run: ranks to assume")
    scratch: dict[str, Any] = {"dest": "finetune", "action": "store_const", "default": argparse.SUPPRESS}
    text = "start from random weights, not from published ones: --finetune ''"
    add("--from-scratch", const="", help=text, **scratch)
    sections = {name: parser.add_argument_group(table.__doc__) for name, table in group_types().items()}
    for setting in all_settings():
        add_flag(sections[setting.group], setting, required=False)
    add_flags_without_effect(parser)
    return parser


def parse(argv: list[str]) -> Request:
    """Parse a command line; `--help` and `--help-all` print and exit."""
    # The help shows what all other flags lead to.
    words = sorted(argv, key=lambda word: word in ("-h", "--help", "--help-all"))
    flags = vars(build_parser().parse_args(words))
    recipe_name, dry_run, ranks = (flags.pop(name) for name in ("recipe", "dry_run", "ranks"))
    config = build_config(recipe_name, flags)
    if unused := ", ".join(name for name in flags if name.startswith("--")):
        warnings = (*config.warnings, f"{unused}: without effect here (docs/migration.md)")
        config = replace(config, warnings=warnings)
    return Request(config, dry_run, ranks)


def build_config(recipe_name: str, chosen: Mapping[str, Any]) -> Config:
    """Build the configuration of a recipe, or of none, and the checked values that override it."""
    flags = dict(chosen)
    chooses_model = not recipe_name and "model" not in flags and flags.get("task", Model.task) == Model.task
    recipe = load_recipe(recipe_name) if recipe_name else {}
    if chooses_model and "data_dir" in flags:
        flags.setdefault("name", Path(flags["data_dir"]).resolve().name)
        recipe = _settings_of_run(flags)
    schedule = flags.keys() & {"epochs", "warmup_epochs", "cooldown_epochs"}
    if chooses_model and not recipe and schedule and "epochs" not in schedule:
        raise UserError(f"--{min(schedule).replace('_', '-')} is part of a schedule. Add --epochs.")
    model = flags.get("model", Model.model)
    published = next(own for family, own in FAMILIES.items() if model.startswith(family))
    below = recipe or published
    flags |= _fitted_schedule(flags, below)
    if (flags.get("mixup") or flags.get("cutmix")) and "mix_token" not in below:  # which is on by default
        flags.setdefault("mix_token", False)
    # resolved.toml states every setting: one that has its default value was not chosen.
    given = {**recipe, **flags}
    defaults = {item.name: item.default for item in all_settings()}
    config = replace(
        assemble({**below, **flags}, fallback_name=recipe_name),
        explicit=frozenset(given),
        non_default=frozenset(name for name, value in given.items() if defaults.get(name, value) != value),
        chooses_model=chooses_model and not recipe,
    )
    check(config)
    if "accumulation" in flags and config.data.global_batch:
        raise UserError(
            f"--accumulation follows from --global-batch {config.data.global_batch}, the ranks and "
            "--batch-size. Leave it out, or add --global-batch 0."
        )
    return config


def _settings_of_run(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the run that is resumed; nothing if none is, or it has none."""
    resume = flags.get("resume", "")
    folder = Path(flags.get("output", Run.output)) / flags["name"] if resume == "auto" else Path(resume)
    of_checkpoint = folder.resolve().parent.parent  # RUN/checkpoints/STEP
    files = (each / "resolved.toml" for each in (folder, of_checkpoint) if resume)
    saved = (file for file in files if file.is_file() and any(file.parent.glob("checkpoints/[!.]*")))
    return next((load_recipe(str(file)) | {"stop_at_step": 0} for file in saved), {})


def _fitted_schedule(flags: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, int]:
    """Return the warm-up and the cool-down of an --epochs of its own, which is the length of the whole run.

    Published command lines with fewer epochs state their warm-up, and keep the cool-down of ten epochs.
    """
    usual = below.get("epochs") or Update.epochs  # 0 of a run that has fitted its classifier
    epochs = flags.get("epochs", usual)
    stated = {"warmup_epochs", "warmup_prefix"} & flags.keys()
    if epochs == usual or stated or below.get("warmup_prefix", Update.warmup_prefix):
        return {}
    warmup = below.get("warmup_epochs", Update.warmup_epochs)
    shorter = min(warmup, -(-warmup * epochs // usual)) if epochs > 1 else 0
    return {"warmup_epochs": shorter, "cooldown_epochs": flags.get("cooldown_epochs", 0)}
