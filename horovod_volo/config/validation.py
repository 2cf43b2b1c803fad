"""What settings must agree on among themselves, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from horovod_volo.config import values
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError

SHARDED_OPTIMIZERS = ("adamw", "sgd")
OUTPUT_STRIDE = 16  # pixels per token label: VOLO's stem divides by 8, its first stage's end by 2


def check(config: Config) -> None:
    """Raise UserError at the first pair of settings that contradict each other."""
    _check_image(config)
    _check_objective(config)
    _check_schedule(config)
    _check_update(config)


def check_flags(flags: Mapping[str, Any], config: Config) -> None:
    """Raise UserError where a flag asks for what another setting already decides."""
    if "accumulation" in flags and config.data.global_batch:
        raise UserError(
            f"--accumulation follows from --global-batch {config.data.global_batch}, the ranks and "
            "--batch-size. Leave it out, or add --global-batch 0."
        )


def _check_image(config: Config) -> None:
    side = config.model.img_size
    if uses_tokens(config):
        check_side(side)
    for name, (low, high) in (("scale", config.data.scale), ("ratio", config.data.ratio)):
        if not 0 < low <= high:
            raise UserError(f"--{name} takes two numbers above 0 in rising order, not {low:g} {high:g}.")
    if config.data.scale[1] > 1:
        raise UserError(
            f"--scale is a share of the image's area and ends at 1, not {config.data.scale[1]:g}."
        )
    for name, share in (
        ("hflip", config.data.hflip),
        ("vflip", config.data.vflip),
        ("reprob", config.data.reprob),
    ):
        if share > 1:
            raise UserError(f"--{name} is a probability and ends at 1, not {share:g}.")


def _check_objective(config: Config) -> None:
    objective = config.objective
    if objective.token_label_data and not objective.token_label:
        raise UserError(
            "--token-label-data is given without --token-label. Add --token-label, or drop the folder."
        )
    if objective.ground_truth and not objective.token_label_data:
        raise UserError(
            "--ground-truth mixes the class into label maps: give --token-label-data, or drop it."
        )

    if objective.map_geometry and not objective.token_label_data:
        raise UserError("--map-geometry is about label maps: give --token-label-data, or drop it.")
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
        raise UserError(f"{mixes[0]} has no token labels for mixed images. Drop it, or --token-label.")
    for name, share in (
        ("mixup-prob", objective.mixup_prob),
        ("mixup-switch-prob", objective.mixup_switch_prob),
    ):
        if share > 1:
            raise UserError(f"--{name} is a probability and ends at 1, not {share:g}.")


def _check_schedule(config: Config) -> None:
    update = config.update
    if update.warmup_epochs > update.epochs and not update.warmup_prefix:
        raise UserError(
            f"--warmup-epochs {update.warmup_epochs} is longer than --epochs {update.epochs}, which contain "
            f"it. Use --warmup-epochs {update.epochs // 10}, or --warmup-prefix."
        )
    if not update.lr and not update.lr_base:
        raise UserError(
            "The learning rate is 0. Give --lr, or --lr-base for a global batch of --lr-base-size."
        )


def uses_tokens(config: Config) -> bool:
    """Say whether the run learns from tokens or mixes them: not every network has some."""
    return config.objective.token_label or config.objective.mix_token


def trains_aux_head(config: Config) -> bool:
    """Say whether the run trains the auxiliary head, which gives the tokens' logits."""
    return config.objective.token_label and config.objective.dense_weight > 0


def check_side(side: int, whose: str = "") -> None:
    """Raise UserError where an image cannot be cut into whole tokens; `whose` says for what network."""
    if side % OUTPUT_STRIDE:
        near = max(2, round(side / OUTPUT_STRIDE)) * OUTPUT_STRIDE
        raise UserError(
            f"--img-size must be a multiple of {OUTPUT_STRIDE}{whose}, not {side}. The nearest is {near}."
        )


def _check_update(config: Config) -> None:
    update = config.update
    if update.layer_decay > 1:
        raise UserError(f"--layer-decay is a share and ends at 1, not {update.layer_decay:g}.")
    if update.shard_optimizer and update.opt not in SHARDED_OPTIMIZERS:
        raise UserError(
            f"--shard-optimizer cuts tensors between ranks, and --opt {update.opt} wants them whole. Use "
            f"--opt {' or '.join(SHARDED_OPTIMIZERS)}, or drop --shard-optimizer."
        )
    if update.shard_optimizer and update.clip_grad and update.clip_mode == "agc":
        raise UserError(
            "--shard-optimizer cuts tensors between ranks, and --clip-mode agc wants them whole. Use "
            "--clip-mode norm."
        )
    if update.ema_warmup and not update.ema_decay:
        raise UserError(
            "--ema-warmup is about averaged weights. Give --ema-decay or --model-ema, or drop --ema-warmup."
        )
    for flag, given in (
        ("--allow-mismatch", config.model.allow_mismatch),
        ("--use-ema", config.model.use_ema),
    ):
        if given and not config.model.finetune:
            raise UserError(f"{flag} is about the weights of --finetune. Give those, or drop it.")


def token_label_side(config: Config) -> int:
    """Token labels per side: the network gives one for every 16 pixels."""
    return config.model.img_size // OUTPUT_STRIDE


def notes(config: Config) -> list[str]:
    """What a user should know about settings that are missing, taken otherwise than typed, or act later."""
    found = list(config.warnings)
    if missing := _missing(config):
        listed = " and ".join(part for part in (", ".join(missing[:-1]), missing[-1]) if part)
        top1 = f"{config.published.top1:.1f} % top-1" if config.published.top1 else "accuracy"
        found.append(
            f"published with {listed}, which this run lacks: the published {top1} cannot be expected"
        )
    asked, side = config.objective.token_label_size, token_label_side(config)
    if config.objective.token_label and asked not in (0, side):
        found.append(
            f"--token-label-size {asked} does not fit --img-size {config.model.img_size}: "
            f"the network has {side} x {side} tokens, so {side} is used"
        )
    if config.model.compile:
        found.append("blocks are compiled when training first comes to them: the first step takes minutes")
    return found


def _missing(config: Config) -> list[str]:
    """Return the flags of the published run that a recipe needs and that were not given."""
    needed = [setting for setting in values.all_settings() if setting.name in config.published.needs]
    return [
        setting.flags[0] for setting in needed if not getattr(getattr(config, setting.group), setting.name)
    ]
