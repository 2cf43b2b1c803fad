"""Checks of settings against each other: contradictions are errors, settings without effect are warnings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from horovod_volo.config import values
from horovod_volo.config.data_checks import check_data
from horovod_volo.config.dense_settings import Detection, Segmentation
from horovod_volo.config.objective_settings import Objective
from horovod_volo.config.schema import Config
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
    if update.warmup_epochs > update.epochs and not update.warmup_prefix:
        raise UserError(
            f"--warmup-epochs {update.warmup_epochs} is longer than --epochs {update.epochs}, which contain "
            f"it. Use --warmup-epochs {update.epochs // 10}, or --warmup-prefix."
        )
    if not update.lr and not update.lr_base:
        raise UserError(
            "The learning rate is 0. Set --lr, or --lr-base for a global batch of --lr-base-size."
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


class RunFacts(NamedTuple):
    """What decides about the effect of settings besides the settings; 0 or empty: not known."""

    ranks: int = 0
    device_type: str = ""
    first_step: int = 0  # above 0 in a run that resumes
    total_steps: int = 0


NOTHING_KNOWN = RunFacts()


class _Idle(NamedTuple):
    """Settings that have no effect in a run for which `applies` is true."""

    names: tuple[str, ...]
    applies: Callable[[Config, RunFacts], object]
    because: str  # may name settings, as {update.opt}


_WITH_TASK = "with --task {model.task}"
_OF_CLASSIFICATION = (  # settings of the group data
    *("scale", "ratio", "hflip", "vflip", "train_interpolation", "aa", "randaugment_on", "color_jitter"),
    *("reprob", "remode", "recount", "crop_pct", "val_split", "val_share", "balance"),
)
_IDLE = (
    _Idle(tuple(Segmentation.__dataclass_fields__), lambda c, _: c.model.task != "segmentation", _WITH_TASK),
    _Idle(tuple(Detection.__dataclass_fields__), lambda c, _: c.model.task != "detection", _WITH_TASK),
    _Idle(("catalog_dir",), lambda c, _: c.model.task == "segmentation", _WITH_TASK),
    _Idle(
        (*Objective.__dataclass_fields__, *_OF_CLASSIFICATION),
        lambda c, _: c.model.task != "classification",
        _WITH_TASK,
    ),
    _Idle(
        (
            "shard_optimizer",
            "compression",
            "bucket_mib",
            "last_bucket_mib",
            "horovod_autotune",
            "horovod_timeline",
        ),
        lambda _, run: run.ranks == 1,
        "with one rank",
    ),
    _Idle(("kernels",), lambda _, run: run.device_type == "cpu", "on a CPU"),
    _Idle(
        ("finetune", "use_ema", "allow_mismatch"),
        lambda _, run: run.first_step,
        "in a run that resumes from a checkpoint",
    ),
    _Idle(
        ("stop_at_step",),
        lambda c, run: run.first_step >= c.run.stop_at_step or 0 < run.total_steps < c.run.stop_at_step,
        "outside of the steps that this run makes",
    ),
    _Idle(
        ("momentum",),
        lambda c, _: c.update.opt in ("adamw", "lamb", "fusedadam", "fusedlamb"),
        "with --opt {update.opt}",
    ),
    _Idle(
        ("momentum",),
        lambda c, _: c.update.opt not in ("sgd", "lars", "muon"),
        "unless the plugin's --opt {update.opt} reads it",
    ),
    _Idle(("lr_base", "lr_base_size"), lambda c, _: c.update.lr, "with --lr"),
    _Idle(
        ("min_lr",),
        lambda c, _: c.update.sched == "constant" and not c.update.cooldown_epochs,
        "with --sched {update.sched} and --cooldown-epochs 0",
    ),
    _Idle(("warmup_lr", "warmup_prefix"), lambda c, _: not c.update.warmup_epochs, "with --warmup-epochs 0"),
    _Idle(("grad_checkpoint_stages",), lambda c, _: not c.model.grad_checkpoint, "without --grad-checkpoint"),
    _Idle(("clip_mode",), lambda c, _: not c.update.clip_grad, "without --clip-grad"),
    _Idle(("accumulation",), lambda c, _: c.data.global_batch, "with --global-batch, which sets it"),
    _Idle(
        ("mixup_prob",),
        lambda c, _: not (c.objective.mixup or c.objective.cutmix),
        "without --mixup or --cutmix",
    ),
    _Idle(
        ("mixup_switch_prob",),
        lambda c, _: not (c.objective.mixup and c.objective.cutmix),
        "without both --mixup and --cutmix",
    ),
    _Idle(
        ("dense_weight", "token_label_size"),
        lambda c, _: not c.objective.token_label,
        "without --token-label",
    ),
    _Idle(
        ("cls_weight", "smoothing", "ground_truth"),
        lambda c, _: c.objective.loss != "soft-target",
        "unless the plugin's --loss {objective.loss} reads it",
    ),
    _Idle(
        ("dense_weight",),  # 0 leaves out the auxiliary head, whatever the loss is
        lambda c, _: c.objective.loss != "soft-target" and c.objective.dense_weight,
        "unless the plugin's --loss {objective.loss} reads it",
    ),
    _Idle(("label_geometry",), lambda c, _: not c.objective.token_label_data, "without --token-label-data"),
    _Idle(
        ("map_geometry",),
        lambda c, _: c.objective.label_geometry == "reference",
        "with --label-geometry reference, which reads every map as the whole image",
    ),
    _Idle(("remode", "recount"), lambda c, _: not c.data.reprob, "with --reprob 0"),
    _Idle(
        ("color_jitter",), lambda c, _: c.data.aa and not c.data.aa.startswith("3a"), "with --aa {data.aa}"
    ),
    _Idle(
        ("randaugment_on",),
        lambda c, _: not (c.data.aa or c.data.color_jitter),
        "without --aa or --color-jitter",
    ),
    _Idle(
        ("cache_dir", "cache_gib"), lambda c, _: "://" not in c.data.data_dir, "without shards on a server"
    ),
    _Idle(("cache_gib",), lambda c, _: not c.data.cache_dir, "without --cache-dir"),
    _Idle(("shuffle_window",), lambda c, _: not c.data.block_shuffle, "without --block-shuffle"),
    _Idle(("bad_samples_limit",), lambda c, _: c.data.bad_samples == "fail", "with --bad-samples fail"),
    _Idle(("test_stride",), lambda c, _: c.segmentation.test_mode == "whole", "with --test-mode whole"),
)


def settings_without_effect(config: Config, run: RunFacts) -> list[str]:
    """Return a warning for each of the stated settings that has no effect beside the others."""
    groups = {name: getattr(config, name) for name in ("update", "data", "objective", "model")}
    stated = [setting for setting in values.all_settings() if setting.name in config.stated]
    reasons = {
        setting.flag: [row.because for row in _IDLE if setting.name in row.names and row.applies(config, run)]
        for setting in stated
    }
    return [f"{flag} has no effect {texts[0].format(**groups)}" for flag, texts in reasons.items() if texts]


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
    if config.model.compile:
        found.append("blocks are compiled at the first step, which takes minutes")
    return found


def _missing(config: Config) -> list[str]:
    """Return the flags that the published run of a recipe needs and that are missing."""
    needed = [setting for setting in values.all_settings() if setting.name in config.published.needs]
    return [setting.flag for setting in needed if not getattr(getattr(config, setting.group), setting.name)]
