"""Settings of the optimizer, the schedule and the gradient exchange: a part of the schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from horovod_volo.config.setting import setting


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
        "decay of the learning rate: cosine, linear, step (a tenth at 66 and 83 %), constant, or a plugin's",
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


@dataclass(frozen=True)
class Exchange:
    """gradient allreduce"""

    compression: Literal["none", "fp16"] = setting("fp16", "compression of gradients for the allreduce")
    bucket_mib: float = setting(25.0, "size of a gradient bucket, MiB", at_least=0.001)
    last_bucket_mib: float = setting(
        1.0, "size of the last bucket, which cannot overlap with backward, MiB", at_least=0.001
    )
