"""Checks of settings against each other: contradictions are errors, and what has no effect is a warning.

The schema declares what a setting needs and excludes, and when it has no effect. What concerns several
settings at once is here.
"""

from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlsplit

from horovod_volo.config.schema import FACTS, RESUMED, Config, all_settings, by_flag
from horovod_volo.config.setting import keyword_arguments, shown
from horovod_volo.config.update_settings import milestones
from horovod_volo.core.errors import UserError

NO_SERVER = "without shards on a server"  # the only condition of the schema about the value of a flag


def holds(condition: str, config: Config, facts: Collection[str] = ()) -> bool:
    """Return whether a condition is one of `facts`, or holds, such as "without --mixup or --cutmix"."""
    if condition in FACTS:
        return condition in facts
    if condition == NO_SERVER:
        return "://" not in config.data.data_dir
    word, _, flags = condition.partition(" ")
    return any(is_set(flag, config) for flag in flags.split(" or ")) == (word == "with")


def is_set(flag: str, config: Config) -> bool:
    """Return whether a flag is neither off, 0 nor empty, or has the value that follows it: "--opt fused*"."""
    name, _, wanted = flag.partition(" ")
    value = by_flag(config)[name]
    return fnmatchcase(shown(value), wanted) if wanted else bool(value)


def check(config: Config) -> None:
    """Raise UserError at the first setting that cannot be right, by itself or beside the others."""
    for setting in all_settings():
        value, flag = setting.value_in(config), setting.flag
        setting.checked(value, flag)
        if value and setting.needs and not is_set(setting.needs, config):
            raise UserError(f"{flag} needs {setting.needs}. Add {setting.needs}, or drop {flag}.")
        for other, message in setting.excludes.items():
            if value and is_set(other, config):
                raise UserError(message.format(flag=flag))
    run, data, objective, update = config.run, config.data, config.objective, config.update
    check_address(data.data_dir)
    check_statistics(data.mean, data.std)
    milestones(update)
    keyword_arguments(config.model.model_kwargs)
    for wrong, message in (
        (
            ".." in Path(run.name).parts or Path(run.name).is_absolute(),
            f"--name {run.name} leaves --output. Give the name of a folder inside it.",
        ),
        (
            objective.label_geometry == "reference" and objective.map_geometry not in ("", "whole"),
            "--label-geometry reference reads every label map as the whole image, as the published code "
            f"does. Drop it, or --map-geometry {objective.map_geometry}.",
        ),
        (
            update.warmup_epochs > update.epochs and not update.warmup_prefix,
            f"--warmup-epochs {update.warmup_epochs} is longer than --epochs {update.epochs}, which contain "
            f"it. Use --warmup-epochs {update.epochs // 10}, or --warmup-prefix.",
        ),
        (
            not update.epochs and not config.model.fit_head,
            "--epochs 0 takes no step. Give at least 1, or fit the classifier to features (--fit-head).",
        ),
        (
            not update.lr and not update.lr_base,
            "The learning rate is 0. Set --lr, or --lr-base for a global batch of --lr-base-size.",
        ),
        (
            (config.launch.elastic or data.reproducible) and config.chooses_model,
            "--elastic and --reproducible need a --recipe or --model: no choice may depend on ranks.",
        ),
        (
            update.shard_optimizer and update.clip_grad and update.clip_mode == "agc",
            "--shard-optimizer cuts tensors between ranks, and --clip-mode agc needs them whole. Use "
            "--clip-mode norm.",
        ),
    ):
        if wrong:
            raise UserError(message)


def check_address(data_dir: str) -> None:
    """Raise UserError if the address of a data folder holds a password: runs print and record it."""
    address = urlsplit(data_dir)
    _, given, host = address.netloc.rpartition("@")
    if given:
        raise UserError(
            "The address of the data folder holds a password, which would be printed and recorded. Give "
            f"{address.scheme}://{host}{address.path}, and write `machine {address.hostname} login USER "
            "password PASSWORD` into ~/.netrc (for s3://, use the settings of AWS tools)."
        )


def check_statistics(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Raise UserError if the mean or the standard deviation of pixels from 0 to 1 cannot be right."""
    for flag, values, lowest in (("--mean", mean, "0"), ("--std", std, "above 0")):
        if not all(0 <= value <= 1 and (value or flag == "--mean") for value in values):
            raise UserError(
                f"{flag} is for pixels from 0 to 1, so its numbers are from {lowest} to 1, not "
                f"{shown(values)}. Divide those of pixels from 0 to 255 by 255."
            )


def uses_tokens(config: Config) -> bool:
    """Return whether the run trains or mixes tokens, which not every model has."""
    return config.objective.token_label or config.objective.mix_token


def trains_aux_head(config: Config) -> bool:
    """Return whether the run trains the auxiliary head, which gives the token logits."""
    return config.objective.token_label and config.objective.dense_weight > 0


def config_warnings(config: Config, facts: Collection[str] = ()) -> list[str]:
    """Return warnings about settings that are missing, without effect, or slow at the start.

    `facts` are those of FACTS that hold for the run. A setting that has its default is without effect in many
    runs, which is no mistake: only stated ones are named.
    """
    found = list(config.warnings)
    for setting in all_settings():
        reasons = [text for text in setting.idle if holds(text, config, facts)]
        if reasons and setting.name in config.non_default:
            found.append(f"{setting.flag} has no effect {reasons[0]}")
    by_name = {setting.name: setting for setting in all_settings()}
    lacking = [by_name[name].flag for name in config.published.needs if not by_name[name].value_in(config)]
    if lacking:
        top1 = f"{config.published.top1:.1f} % top-1" if config.published.top1 else "accuracy"
        found.append(
            f"published with {' and '.join(lacking)}, which this run lacks: do not expect the published "
            f"{top1}"
        )
    if config.model.freeze and not (config.model.finetune or RESUMED in facts):
        found.append("--freeze without --finetune: the frozen weights are random, and stay so")
    if config.model.compile:
        found.append("blocks are compiled at the first step, which takes minutes")
    return found
