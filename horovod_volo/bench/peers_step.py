"""Training steps as people write them around timm's VOLO: what our step is measured against.

Invariant: no line of our step or our network takes part, of which a mistake could be on both sides; what is
shared is sizes, images and labels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.bench.peers_loss import PublishedLoss
from horovod_volo.config.schema import Config, Objective
from horovod_volo.config.validation import trains_aux_head
from horovod_volo.data.loader import Batch
from horovod_volo.models.timm_api import VOLO
from horovod_volo.models.volo import SIZES
from horovod_volo.objective.loss import Labels
from horovod_volo.objective.mixtoken import Box

PUBLISHED = "published"  # the published training with token labels

_LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}

Step = Callable[[], Tensor]  # makes one step, returns its loss


@dataclass
class Peer:
    """A network of timm's modules and what makes a step of it."""

    network: nn.Module
    step: Step


def plain_peer(form: str, config: Config, batch: Batch, device: torch.device) -> Peer:
    """Build timm's network in a plain loop that learns the images' classes."""
    model = VOLO(**volo_arguments(config)).to(device).train()
    images = batch.images
    if form == "channels-last":
        model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    features: Callable[[Tensor], Tensor] = model.forward_features
    if form == "compile":
        features = torch.compile(features)

    def loss() -> Tensor:
        # timm's forward adds the best token's logits to the class's; the class token's are learned alone.
        logits = model.head(features(images)[:, 0])
        return F.cross_entropy(logits, batch.classes, label_smoothing=config.objective.smoothing)

    return Peer(model, _step(model, loss, config, device))


def published_peer(config: Config, batch: Batch, device: torch.device, box: Box) -> Peer:
    """Build timm's modules in the published training: tokens mixed by a box, dense targets for all."""
    model = PublishedVolo(volo_arguments(config)).to(device).train()
    side = config.model.img_size // 16
    dense = PublishedLoss(Objective(token_label=True), config.model.num_classes, side)
    labels = Labels(batch.classes, batch.scores, batch.ids, batch.boxes)

    def loss() -> Tensor:
        class_logits, token_logits = model(batch.images, box)
        return dense(class_logits.float(), token_logits.float(), labels, box)

    return Peer(model.volo, _step(model, loss, config, device))


class PublishedVolo(nn.Module):
    """timm's VOLO with the published training pass: logits of all tokens, exchanged back."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.volo = VOLO(**arguments)

    def forward(self, images: Tensor, box: Box) -> tuple[Tensor, Tensor]:
        """Return class logits (batch, classes) and token logits (batch, tokens, classes)."""
        volo = self.volo
        tokens = box.swap_tokens(volo.patch_embed(images).permute(0, 2, 3, 1))
        features = volo.norm(volo.forward_cls(volo.forward_tokens(tokens)))
        grid = volo.aux_head(features[:, 1:]).unflatten(1, volo.pos_embed.shape[1:3])
        return volo.head(features[:, 0]), box.swap_tokens(grid).flatten(1, 2)


def volo_arguments(config: Config) -> dict[str, Any]:
    """Return what timm builds a network of these settings with."""
    return {
        "img_size": config.model.img_size,
        "num_classes": config.model.num_classes,
        "drop_path_rate": config.model.drop_path,
        "use_aux_head": trains_aux_head(config),
        **SIZES[config.model.model],
    }


def _step(model: nn.Module, loss: Callable[[], Tensor], config: Config, device: torch.device) -> Step:
    """Return a step of the plain loop: AdamW as timm sets it up, weights of norms and biases not decayed."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": config.update.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.update.lr)
    lower = _LOWER.get(config.model.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=config.model.precision == "fp16")

    def step() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=lower or torch.bfloat16, enabled=lower is not None):
            value = loss()
        scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        return value.detach()

    return step
