"""Checks of settings against each other: contradictions are errors, and what a run lacks is a warning.

`without_effect` knows the settings that have no effect beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horovod_volo.config import values
from horovod_volo.config.data_checks import check_data
from horovod_volo.config.logging_settings import check_loggers
from horovod_volo.config.schema import Config
from horovod_volo.config.update_settings import milestones, warmup_epochs
from horovod_volo.config.without_effect import NOTHING_KNOWN, RunFacts, settings_without_effect
from horovod_volo.core.errors import UserError


def check(config: Config) -> None:
    """Raise UserError at the first pair of settings that contradict each other."""
    if ".." in Path(config.run.name).parts or Path(config.run.name).is_absolute():
        raise UserError(f"--name {config.run.name} leaves --output. Give the name of a folder inside it.")
    check_data(config.data)
    _check_objective(config)
    _check_schedule(config)
    _check_update(config)
    _check_elastic(config)
    check_loggers(config.logging)


def check_flags(flags: Mapping[str, Any], config: Config) -> None:
    """Raise UserError if a flag sets what follows from another setting."""
    if "accumulation" in flags and config.data.global_batch:
        raise UserError(
            f"--accumulation follows from --global-batch {config.data.global_batch}, the ranks and "
            "--batch-size. Leave it out, or add --global-batch 0."
        )


def _check_objective(config: Config) -> None:
    objective = config.objective
    if objective.token_label_data and not objective.token_label:
        raise UserError(
            "--token-label-data needs --token-label. Add --token-label, or drop --token-label-data."
        )
    if objective.token_label_data and config.data.aa.startswith("augmix"):
        raise UserError(
            "AugMix mixes images that were rotated and moved differently, and no label map describes that. "
            "Use another --aa, or drop --token-label-data."
        )
    if objective.ground_truth and not objective.token_label_data:
        raise UserError(
            "--ground-truth blends the class into label maps. Add --token-label-data, or drop --ground-truth."
        )

    if objective.class_weights == "balanced" and config.data.balance:
        raise UserError(
            "--balance and --class-weights balanced both make rare classes count more. Drop one of them."
        )
    if objective.class_weights and objective.loss != "soft-target":
        raise UserError(
            f"--class-weights is for --loss soft-target; --loss {objective.loss} does not read it. Drop it."
        )
    if objective.bce_target_threshold and objective.token_label_data:
        raise UserError(
            "--bce-target-threshold is for the targets of mixed images, and label maps are no such targets. "
            "Drop it, or --token-label-data."
        )
    if objective.map_geometry and not objective.token_label_data:
        raise UserError("--map-geometry is about label maps. Add --token-label-data, or drop --map-geometry.")
    if objective.label_geometry == "reference" and objective.map_geometry not in ("", "whole"):
        raise UserError(
            "--label-geometry reference reads every label map as the whole image, as the published code "
            f"does. Drop it, or --map-geometry {objective.map_geometry}."
        )

    mixes = [
        name for name, strength in (("--mixup", objective.mixup), ("--cutmix", objective.cutmix)) if strength
    ]
    if mixes and objective.mix_token:
        raise UserError(f"{mixes[0]} and MixToken both mix images. Add --no-mix-token, or drop {mixes[0]}.")
    if mixes and objective.token_label:
        raise UserError(f"{mixes[0]} cannot mix token labels. Drop it, or drop --token-label.")
    for name, probability in (
        ("mixup-prob", objective.mixup_prob),
        ("mixup-switch-prob", objective.mixup_switch_prob),
    ):
        if probability > 1:
            raise UserError(f"--{name} is a probability, at most 1, not {probability:g}.")


def _check_schedule(config: Config) -> None:
    update = config.update
    if warmup_epochs(update) > update.epochs and not update.warmup_prefix:
        raise UserError(
            f"--warmup-epochs {update.warmup_epochs} is longer than --epochs {update.epochs}, which contain "
            f"it. Use --warmup-epochs {update.epochs // 10}, or --warmup-prefix."
        )
    if not update.lr and not update.lr_base:
        raise UserError(
            "The learning rate is 0. Set --lr, or --lr-base for a global batch of --lr-base-size."
        )
    milestones(update)
    if update.cycle_up > 0.5:
        raise UserError(
            f"--cycle-up {update.cycle_up:g} leaves too few epochs to come down again: it is at most 0.5, "
            "and below 0.5 some are left to reach --min-lr."
        )


def _check_elastic(config: Config) -> None:
    if not config.launch.elastic:
        return
    if config.is_open:
        raise UserError(
            "--elastic needs a --recipe or --model: what is chosen for images and ranks must not change with "
            "them."
        )
    if config.launch.horovod_autotune:
        raise UserError("Horovod cannot tune an elastic run. Drop --horovod-autotune, or --elastic.")
    if config.update.shard_optimizer:
        raise UserError(
            "--elastic needs the whole optimizer state on every rank. Drop --shard-optimizer, or --elastic."
        )


def uses_tokens(config: Config) -> bool:
    """Return whether the run trains or mixes tokens, which not every model has."""
    return config.objective.token_label or config.objective.mix_token


def trains_aux_head(config: Config) -> bool:
    """Return whether the run trains the auxiliary head, which gives the token logits."""
    return config.objective.token_label and config.objective.dense_weight > 0


def _check_update(config: Config) -> None:
    update = config.update
    if update.layer_decay > 1:
        raise UserError(f"--layer-decay must be at most 1, not {update.layer_decay:g}.")
    if update.shard_optimizer and update.clip_grad and update.clip_mode == "agc":
        raise UserError(
            "--shard-optimizer cuts tensors between ranks, and --clip-mode agc needs them whole. Use "
            "--clip-mode norm."
        )
    if update.ema_warmup and not update.ema_decay:
        raise UserError(
            "--ema-warmup needs EMA weights. Add --ema-decay or --model-ema, or drop --ema-warmup."
        )
    for flag, given in (
        ("--allow-mismatch", config.model.allow_mismatch),
        ("--use-ema", config.model.use_ema),
    ):
        if given and not config.model.finetune:
            raise UserError(f"{flag} needs --finetune. Add --finetune, or drop {flag}.")


def config_warnings(config: Config, run: RunFacts = NOTHING_KNOWN) -> list[str]:
    """Return warnings about settings that are missing, without effect, or slow at the start."""
    found = [*config.warnings, *settings_without_effect(config, run)]
    if missing := _missing(config):
        listed = " and ".join(part for part in (", ".join(missing[:-1]), missing[-1]) if part)
        top1 = f"{config.published.top1:.1f} % top-1" if config.published.top1 else "accuracy"
        found.append(f"published with {listed}, which this run lacks: do not expect the published {top1}")
    if config.model.freeze and not (config.model.finetune or run.first_step):
        found.append("--freeze without --finetune: the frozen weights are random, and stay so")
    if config.model.compile:
        found.append("blocks are compiled at the first step, which takes minutes")
    return found


def _missing(config: Config) -> list[str]:
    """Return the flags that the published run of a recipe needs and that are missing."""
    needed = [setting for setting in values.all_settings() if setting.name in config.published.needs]
    return [setting.flag for setting in needed if not getattr(getattr(config, setting.group), setting.name)]
