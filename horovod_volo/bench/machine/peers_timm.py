"""Peers made of timm: its outlook attention, its weight update, and training steps around its VOLO.

Invariant: no line of our step, network or update takes part, so that no mistake is on both sides; what is
shared is sizes, images, labels and MixToken's box.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.bench.machine.peers_loss import PublishedLoss
from horovod_volo.config.schema import Config, Objective
from horovod_volo.config.validation import trains_aux_head
from horovod_volo.core.batch import TrainBatch
from horovod_volo.models.timm_api import VOLO
from horovod_volo.models.volo import SIZES
from horovod_volo.objective.mixing import Box

# isort: split
# After timm_door, which makes torchvision importable for timm.
import timm.optim
import timm.utils
from timm.models.volo import OutlookAttention

LoopName = Literal["eager", "channels-last", "compile", "published"]
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TrainingLoop(NamedTuple):
    """A network of timm's modules, and a function that takes one step and returns its loss."""

    network: nn.Module
    step: Callable[[], Tensor]


def plain_loop(
    form: LoopName,
    config: Config,
    batch: TrainBatch,
    device: torch.device,
    autocast: AbstractContextManager[object] | None = None,
) -> TrainingLoop:
    """Build timm's network in a plain loop that learns the images' classes."""
    model = VOLO(**_volo_arguments(config)).to(device).train()
    images = batch.images
    if form == "channels-last":
        model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    features: Callable[[Tensor], Tensor] = model.forward_features
    if form == "compile":
        features = torch.compile(features)

    def loss() -> Tensor:
        # timm's forward adds the best token's logits to the class token's; here the class token learns alone.
        logits = model.head(features(images)[:, 0])
        return F.cross_entropy(logits, batch.labels.classes, label_smoothing=config.objective.smoothing)

    return TrainingLoop(model, _step(model, loss, config, device, autocast))


def published_loop(
    config: Config,
    batch: TrainBatch,
    device: torch.device,
    box: Box,
    autocast: AbstractContextManager[object] | None = None,
) -> TrainingLoop:
    """Build the published training with timm's modules: tokens mixed by a box, dense targets."""
    model = VOLO(**_volo_arguments(config)).to(device).train()
    dense = PublishedLoss(Objective(token_label=True), config.model.num_classes, config.model.img_size // 16)
    labels = batch.labels

    def loss() -> Tensor:
        tokens = box.swap_tokens(model.patch_embed(batch.images).permute(0, 2, 3, 1))
        features = model.norm(model.forward_cls(model.forward_tokens(tokens)))
        grid = model.aux_head(features[:, 1:]).unflatten(1, model.pos_embed.shape[1:3])
        token_logits = box.swap_tokens(grid).flatten(1, 2)  # (batch, tokens, classes)
        return dense(model.head(features[:, 0]).float(), token_logits.float(), labels, box)

    return TrainingLoop(model, _step(model, loss, config, device, autocast))


def _volo_arguments(config: Config) -> dict[str, Any]:
    return {
        "img_size": config.model.img_size,
        "num_classes": config.model.num_classes,
        "drop_path_rate": config.model.drop_path,
        "use_aux_head": trains_aux_head(config),
        **SIZES[config.model.model],
    }


def _step(
    model: nn.Module,
    loss: Callable[[], Tensor],
    config: Config,
    device: torch.device,
    autocast: AbstractContextManager[object] | None,
) -> Callable[[], Tensor]:
    """Return a plain step: AdamW as timm sets it up, without weight decay on norms and biases."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": config.update.weight_decay},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    # On a GPU torch updates all tensors at once, unless told otherwise.
    optimizer = torch.optim.AdamW(groups, lr=config.update.lr, foreach=device.type == "meta" or None)
    dtype = _AUTOCAST.get(config.model.precision)
    autocast = autocast or torch.autocast(
        device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None
    )
    scaler = torch.amp.GradScaler(device.type, enabled=config.model.precision == "fp16")

    def step() -> Tensor:
        optimizer.zero_grad()
        with autocast:
            value = loss()
        scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return value.detach()

    return step


class TimmUpdate:
    """Clips the gradients, updates and averages the weights; timm leaves zeroing gradients to backward.

    By timm's defaults AdamW is not fused and the average is ModelEmaV2. With `fastest`, torch's fused AdamW
    and ModelEmaV3, which averages all tensors at once.
    """

    def __init__(
        self, model: nn.Module, *, lr: float, weight_decay: float, max_norm: float, ema: float, fastest: bool
    ) -> None:
        self._model, self._max_norm = model, max_norm
        choices = {"fused": True} if fastest else {}
        self._optimizer = timm.optim.create_optimizer_v2(
            model, opt="adamw", lr=lr, weight_decay=weight_decay, **choices
        )
        self._average: Any = (
            timm.utils.ModelEmaV3(model, decay=ema, foreach=True)
            if fastest
            else timm.utils.ModelEmaV2(model, decay=ema)
        )

    def __call__(self) -> None:
        """Take one step."""
        timm.utils.dispatch_clip_grad(list(self._model.parameters()), self._max_norm, mode="norm")
        self._optimizer.step()
        self._average.update(self._model)

    def averages(self) -> Iterable[Tensor]:
        """Return the averaged weights."""
        averages: Iterable[Tensor] = self._average.module.parameters()
        return averages


def outlook_module(channels: int, heads: int) -> nn.Module:
    """Build timm's outlook attention as VOLO does."""
    module: nn.Module = OutlookAttention(channels, heads, kernel_size=3, padding=1, stride=2)
    return module


def outlook_core(values: Tensor, scores: Tensor, heads: int, scale: float) -> Tensor:
    """Apply that module's operations between its linear layers to values (batch, height, width, channels)."""
    batch, height, width, channels = values.shape
    windows = scores.shape[1] * scores.shape[2]
    unfolded = F.unfold(values.permute(0, 3, 1, 2), kernel_size=3, padding=1, stride=2)
    sources = unfolded.reshape(batch, heads, channels // heads, 9, windows).permute(0, 1, 4, 3, 2)
    by_window = scores.reshape(batch, windows, heads, 9, 9).permute(0, 2, 1, 3, 4)
    mixed = (by_window * scale).softmax(dim=-1) @ sources
    columns = mixed.permute(0, 1, 4, 3, 2).reshape(batch, channels * 9, windows)
    return F.fold(columns, (height, width), kernel_size=3, padding=1, stride=2).permute(0, 2, 3, 1)
