"""Settings of the optimizer, the schedule and the gradient exchange: a part of the schema."""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from horovod_volo.config.setting import BelowOne, Count, CountOrZero, NonNegative, setting
from horovod_volo.core.errors import UserError

# As published for SSD: before epochs 43 and 54 of 65.
_SSD_MILESTONES = (43 / 65, 54 / 65)


@dataclass(frozen=True)
class Update:
    """optimizer and schedule"""

    opt: str = setting(
        "adamw", "optimizer: adamw, muon, lamb, lars, sgd, Apex's fusedadam or fusedlamb, or a plugin's"
    )
    momentum: BelowOne = setting(
        0.9, "momentum of lars, muon and sgd", idle=("with --opt adamw or --opt lamb or --opt fused*",)
    )
    opt_betas: tuple[float, float] = setting(
        (),
        "decay of the two averages of --opt adamw, muon, lamb, fused*; empty: 0.9 0.999",
        at_least=0.0,
        below=1.0,
    )
    opt_eps: NonNegative = setting(
        0.0, "what these optimizers add to the root of the second average; 0: 1e-8, of lamb 1e-6"
    )
    layer_decay: float = setting(
        1.0, "learning rate of a layer relative to that above it; 1: all alike", at_least=0.001, at_most=1.0
    )
    shard_optimizer: bool = setting(
        False,
        "shard the optimizer state over ranks (ZeRO stage 1), which divides its memory by the ranks",
        idle=("with one rank",),
        excludes={
            "--elastic": "--elastic needs the whole optimizer state on every rank. Drop {flag}, or --elastic."
        },
    )
    lr: NonNegative = setting(
        0.0,
        "peak learning rate, not scaled, nor are --min-lr and --warmup-lr; 0: --lr-base and these two are "
        "scaled by global batch / --lr-base-size",
        aliases=("--learning-rate",),
    )
    lr_base: NonNegative = setting(
        1.6e-3, "peak learning rate at a global batch of --lr-base-size", idle=("with --lr",)
    )
    lr_base_size: CountOrZero = setting(
        1024,
        "global batch that --lr-base, --min-lr and --warmup-lr are stated for; 0: --lr-base is for 1024, the "
        "other two are not scaled",
        idle=("with --lr",),
    )
    min_lr: NonNegative = setting(1e-5, "learning rate at the end of the decay and in the cool-down")
    sched: str = setting("cosine", "learning rate decay: cosine, linear, poly, step, constant, or a plugin's")
    decay_milestones: str = setting(
        "",
        "--sched step: epochs, separated by commas, at which the learning rate's distance to --min-lr is "
        "multiplied by --decay-rate; empty: 66 and 83 % of --epochs",
        joined=",",
        idle=("without --sched step",),
    )
    decay_epochs: float = setting(
        0.0,
        "--sched step: epochs between milestones; 0: --decay-milestones",
        at_least=0.01,
        idle=("without --sched step",),
        excludes={"--decay-milestones": "{flag} and --decay-milestones are two ways to say when. Drop one."},
    )
    decay_rate: BelowOne = setting(
        0.1,
        "--sched step: factor of the learning rate's distance to --min-lr at each milestone",
        also=("--dr",),
        idle=("without --sched step",),
    )
    poly_power: float = setting(
        0.9,
        "--sched poly: power to which (1 - the fraction of the decay that has passed) is raised",
        at_least=0.01,
        idle=("without --sched poly",),
    )
    warmup_lr: NonNegative = setting(
        1e-6, "learning rate at the first step of the warm-up", idle=("with --warmup-epochs 0",)
    )
    epochs: CountOrZero = setting(300, "epochs of warm-up and decay; 0, with --fit-head: none")
    warmup_epochs: CountOrZero = setting(20, "epochs of linear warm-up, counted among --epochs")
    warmup_prefix: bool = setting(
        False, "warm up before --epochs instead of inside", idle=("with --warmup-epochs 0",)
    )
    lr_changes: Literal["step", "epoch"] = setting(
        "step",
        "change the learning rate at every step, or, as published, only at the start of an epoch",
        also=("--sched-on-updates=step",),
    )
    cooldown_epochs: CountOrZero = setting(10, "epochs at --min-lr after --epochs")
    weight_decay: NonNegative = setting(
        0.05, "weight decay of matrices and filters; biases, norms and embeddings have none"
    )
    clip_grad: NonNegative = setting(0.0, "bound of --clip-mode on the averaged gradient; 0: off")
    clip_mode: Literal["norm", "value", "agc"] = setting(
        "norm",
        "clip the global norm, each value, or each unit's norm relative to its weights' norm (AGC)",
        idle=("without --clip-grad",),
    )
    accumulation: Count = setting(
        1,
        "micro-batches per step, accumulated on the rank before the allreduce",
        aliases=("--local-accumulation",),
        also=("--grad-accum-steps", "--grad-accumulation"),
    )
    ema_decay: BelowOne = setting(
        0.0,
        "decay per step of the EMA weights, which are evaluated beside the raw ones; 0: no EMA",
        also=("--model-ema-decay", "--model-ema=0.99992"),
    )
    ema_warmup: bool = setting(
        False,
        "EMA decay rises as (1 + step) / (10 + step) up to --ema-decay; off: constant, as published",
        aliases=("--model-ema-warmup",),
        needs="--ema-decay",
    )


def milestones(update: Update) -> tuple[float, ...]:
    """Return the milestones as fractions of --epochs; raise UserError if they cannot be right."""
    if every := update.decay_epochs:
        return tuple(every * number / update.epochs for number in range(1, ceil(update.epochs / every)))
    if not update.decay_milestones:
        return _SSD_MILESTONES
    words = update.decay_milestones.split(",")
    epochs = [int(word) for word in words if word.strip().isdecimal()]
    ascending = epochs == sorted(set(epochs)) and len(epochs) == len(words)
    if not ascending or not 0 < epochs[0] <= epochs[-1] < update.epochs:
        raise UserError(
            f"--decay-milestones takes ascending epochs from 1 to {update.epochs - 1}, one less than "
            f"--epochs, separated by commas, such as 30,60,80, not {update.decay_milestones!r}."
        )
    return tuple(epoch / update.epochs for epoch in epochs)


def all_epochs(update: Update) -> int:
    """Return the epochs of a run, with its cool-down and a --warmup-prefix."""
    prefix = update.warmup_epochs if update.warmup_prefix else 0
    return prefix + update.epochs + update.cooldown_epochs


@dataclass(frozen=True)
class Exchange:
    """gradient allreduce"""

    compression: Literal["none", "fp16"] = setting(
        "fp16", "compression of gradients for the allreduce", idle=("with --reproducible",)
    )
    bucket_mib: float = setting(25.0, "size of a gradient bucket, MiB", at_least=0.001)
    last_bucket_mib: float = setting(
        1.0, "size of the last bucket, which cannot overlap with backward, MiB", at_least=0.001
    )
