"""Settings of the optimizer, the schedule and the gradient exchange: a part of the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from horovod_volo.config.setting import setting
from horovod_volo.core.errors import UserError

# As published for SSD: before epochs 43 and 54 of 65.
_SSD_MILESTONES = (43 / 65, 54 / 65)


@dataclass(frozen=True)
class Update:
    """optimizer and schedule"""

    opt: str = setting(
        "adamw",
        "optimizer: adamw, muon, lamb, lars, sgd, NVIDIA Apex's fusedadam or fusedlamb, or a plugin's",
    )
    momentum: float = setting(0.9, "momentum of lars, muon and sgd", at_least=0.0, below=1.0)
    layer_decay: float = setting(
        1.0, "learning rate of each layer relative to the layer above it; 1: all alike", at_least=0.001
    )
    shard_optimizer: bool = setting(
        False, "shard the optimizer state over ranks (ZeRO stage 1), which divides its memory by the ranks"
    )
    lr: float = setting(
        0.0,
        "peak learning rate, not scaled, nor are --min-lr and --warmup-lr; 0: --lr-base and these two are "
        "scaled by global batch / --lr-base-size",
        aliases=("--learning-rate",),
        at_least=0.0,
    )
    lr_base: float = setting(1.6e-3, "peak learning rate at a global batch of --lr-base-size", at_least=0.0)
    lr_base_size: int = setting(
        1024,
        "global batch that --lr-base, --min-lr and --warmup-lr are stated for; 0: --lr-base is for 1024, the "
        "other two are not scaled",
        at_least=0,
    )
    min_lr: float = setting(1e-5, "learning rate at the end of the decay and in the cool-down", at_least=0.0)
    sched: str = setting(
        "cosine",
        "decay of the learning rate: cosine, linear, poly, step, constant, one-cycle, or a plugin's",
    )
    decay_milestones: str = setting(
        "",
        "--sched step: epochs, separated by commas, at which the learning rate's distance to --min-lr is "
        "multiplied by --decay-rate; empty: 66 and 83 % of --epochs",
    )
    decay_rate: float = setting(
        0.1,
        "--sched step: factor of the learning rate's distance to --min-lr at each milestone",
        at_least=0.0,
        below=1.0,
    )
    poly_power: float = setting(
        0.9,
        "--sched poly: power to which (1 - the fraction of the decay that has passed) is raised",
        at_least=0.01,
    )
    cycle_up: float = setting(
        0.45,
        "--sched one-cycle: fraction of --epochs in which the learning rate rises, and of those in which it "
        "falls again; the rest leads to --min-lr",
        at_least=0.01,
    )
    cycle_start: float = setting(
        0.04,
        "--sched one-cycle: where the learning rate starts and the cycle ends, as a fraction of the way from "
        "--min-lr to the peak",
        at_least=0.0,
        below=1.0,
    )
    warmup_lr: float = setting(1e-6, "learning rate at the first step of the warm-up", at_least=0.0)
    epochs: int = setting(300, "epochs of warm-up and decay", at_least=1)
    warmup_epochs: int = setting(20, "epochs of linear warm-up, counted among --epochs", at_least=0)
    warmup_prefix: bool = setting(False, "add the warm-up epochs before --epochs instead of counting them in")
    lr_changes: Literal["step", "epoch"] = setting(
        "step", "change the learning rate at every step, or, as published, only at the start of an epoch"
    )
    cooldown_epochs: int = setting(10, "epochs at --min-lr after --epochs", at_least=0)
    weight_decay: float = setting(
        0.05, "weight decay of matrices and filters; biases, norms and embeddings have none", at_least=0.0
    )
    clip_grad: float = setting(0.0, "bound of --clip-mode on the averaged gradient; 0: off", at_least=0.0)
    clip_mode: Literal["norm", "value", "agc"] = setting(
        "norm",
        "clip the global norm, each value, or each unit's norm relative to its weights' norm (AGC)",
    )
    accumulation: int = setting(
        1,
        "micro-batches per step, accumulated on the rank before the allreduce",
        aliases=("--local-accumulation",),
        at_least=1,
    )
    ema_decay: float = setting(
        0.0,
        "decay per step of the EMA weights, which are evaluated beside the raw ones; 0: no EMA",
        shorthands={"--model-ema": 0.99992},
        at_least=0.0,
        below=1.0,
    )
    ema_warmup: bool = setting(
        False,
        "EMA decay rises as (1 + step) / (10 + step) up to --ema-decay; off: constant, as published",
        aliases=("--model-ema-warmup",),
    )


def milestones(update: Update) -> tuple[float, ...]:
    """Return --decay-milestones as fractions of --epochs; raise UserError if they cannot be right."""
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


def warmup_epochs(update: Update) -> int:
    """Return the epochs of the warm-up; a one-cycle schedule rises by itself, and has none."""
    return 0 if update.sched == "one-cycle" else update.warmup_epochs


@dataclass(frozen=True)
class Exchange:
    """gradient allreduce"""

    compression: Literal["none", "fp16"] = setting("fp16", "compression of gradients for the allreduce")
    bucket_mib: float = setting(25.0, "size of a gradient bucket, MiB", at_least=0.001)
    last_bucket_mib: float = setting(
        1.0, "size of the last bucket, which cannot overlap with backward, MiB", at_least=0.001
    )
