"""Settings that have no effect beside the others, or in a run on these ranks and devices: a table.

Invariant: it is about settings that the user states; a default without effect is no mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from horovod_volo.config import values
from horovod_volo.config.dense_settings import Detection, Segmentation
from horovod_volo.config.objective_settings import Objective
from horovod_volo.config.schema import Config
from horovod_volo.config.update_settings import Exchange, warmup_epochs


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
_OUR_LOSSES = ("soft-target", "bce")
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
        (*Exchange.__dataclass_fields__, "shard_optimizer", "horovod_autotune", "horovod_timeline"),
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
        lambda c, run: run.first_step > c.run.stop_at_step or 0 < run.total_steps < c.run.stop_at_step,
        "outside of the steps that this run makes",
    ),
    _Idle(
        ("early_stop",),
        lambda c, _: c.run.early_stop > _evaluations(c) - 2,  # after the first one, and not at the last
        "with so few evaluations (--epochs, --eval-every)",
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
    _Idle(("decay_milestones", "decay_rate"), lambda c, _: c.update.sched != "step", "without --sched step"),
    _Idle(("poly_power",), lambda c, _: c.update.sched != "poly", "without --sched poly"),
    _Idle(
        ("cycle_up", "cycle_start"),
        lambda c, _: c.update.sched != "one-cycle",
        "without --sched one-cycle",
    ),
    _Idle(
        ("warmup_epochs", "warmup_lr", "warmup_prefix"),
        lambda c, _: c.update.sched == "one-cycle",
        "with --sched one-cycle, which rises by itself (--cycle-up, --cycle-start)",
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
        lambda c, _: c.objective.loss not in _OUR_LOSSES,
        "unless the plugin's --loss {objective.loss} reads it",
    ),
    _Idle(
        ("dense_weight",),  # 0 leaves out the auxiliary head, whatever the loss is
        lambda c, _: c.objective.loss not in _OUR_LOSSES and c.objective.dense_weight,
        "unless the plugin's --loss {objective.loss} reads it",
    ),
    _Idle(("bce_target_threshold",), lambda c, _: c.objective.loss != "bce", "without --loss bce"),
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


def _evaluations(config: Config) -> int:
    """Return how often a run is evaluated, with that at its end."""
    update = config.update
    prefix = warmup_epochs(update) if update.warmup_prefix else 0
    return -(-(prefix + update.epochs + update.cooldown_epochs) // config.run.eval_every)


def settings_without_effect(config: Config, run: RunFacts) -> list[str]:
    """Return a warning for each of the stated settings that has no effect beside the others."""
    groups = {name: getattr(config, name) for name in ("update", "data", "objective", "model")}
    stated = [setting for setting in values.all_settings() if setting.name in config.stated]
    reasons = {
        setting.flag: [row.because for row in _IDLE if setting.name in row.names and row.applies(config, run)]
        for setting in stated
    }
    return [f"{flag} has no effect {texts[0].format(**groups)}" for flag, texts in reasons.items() if texts]
