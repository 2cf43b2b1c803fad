"""What a trained network says of every part of an image, whatever its make.

A teacher's own head is asked about each cell of its last features as if that cell were the whole image, so
that its norms and its linear layers are used exactly as it was trained with them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from horovod_volo.config.errors import UserError
from horovod_volo.config.recipe import load_recipe
from horovod_volo.config.values import nearest
from horovod_volo.models.build import build_model
from horovod_volo.models.timm_door import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    VOLO,
    create_model,
    get_pretrained_cfg,
    is_model,
    list_models,
)
from horovod_volo.models.volo import SIZES
from horovod_volo.models.weights import load_weights, read_weights

USUAL_SIDE = 224
SETTINGS_OF_RUN = "resolved.toml"


@dataclass(frozen=True)
class Teacher:
    """A trained network that labels cells."""

    network: nn.Module
    name: str  # with the size of its images and a fingerprint of its weights
    image_side: int
    mean: tuple[float, float, float]  # of the colours from 0 to 1 that it was trained on
    std: tuple[float, float, float]

    def label(self, colours: Tensor) -> Tensor:
        """Return logits (images, classes, rows, columns) of images (images, 3, side, side) from 0 to 1."""
        mean, std = (colours.new_tensor(values).view(1, 3, 1, 1) for values in (self.mean, self.std))
        with torch.inference_mode():
            return token_logits(self.network, (colours - mean) / std)


def load_teacher(name: str, *, weights: str, pretrained: bool, image_side: int, classes: int) -> Teacher:
    """Build a teacher of `classes` classes and give it its weights, ready to label on torch's CPU.

    `name` is one of timm's, one of ours, or the folder of a run; `image_side` 0: what suits the teacher.
    """
    if Path(name).is_dir():
        network, side = _of_run(Path(name), weights, image_side, classes)
    elif name in SIZES:
        side = image_side or USUAL_SIDE
        network = _ours(name, _required(weights, name), side, classes)
    elif is_model(name):
        return _of_timm(name, weights, pretrained, image_side, classes)
    else:
        hint = nearest(name, [*SIZES, *list_models()])
        raise UserError(
            f"there is no teacher {name!r}.{hint} Name a model of timm, one of {', '.join(SIZES)}, or the "
            "folder of a run."
        )
    shown = name if name in SIZES else Path(name).resolve().name
    return _ready(network, shown, side, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)


def token_logits(network: nn.Module, images: Tensor) -> Tensor:
    """Return logits (images, classes, rows, columns) of a timm classification network's cells."""
    if not all(callable(getattr(network, part, None)) for part in ("forward_features", "forward_head")):
        raise _unsuitable(network, "it has no features and head of their own")
    features: Any = network.forward_features(images)  # type: ignore[operator]
    if not isinstance(features, Tensor) or features.ndim not in (3, 4):
        raise _unsuitable(network, "its features are no map and no sequence of tokens")
    if isinstance(network, VOLO):
        return _logits_of_volo(network, features)
    return _logits_of_map(network, features) if features.ndim == 4 else _logits_of_tokens(network, features)


def _logits_of_volo(network: VOLO, features: Tensor) -> Tensor:
    _, rows, columns, _ = network.pos_embed.shape
    head = network.head if network.aux_head is None else network.aux_head
    logits: Tensor = head(features[:, 1:])  # (images, rows * columns, classes)
    return logits.reshape(len(logits), rows, columns, -1).permute(0, 3, 1, 2)


def _logits_of_map(network: nn.Module, features: Tensor) -> Tensor:
    if getattr(network, "output_fmt", "NCHW") == "NHWC":
        images, rows, columns, channels = features.shape
        cells = features.reshape(-1, 1, 1, channels)
    else:
        images, channels, rows, columns = features.shape
        cells = features.permute(0, 2, 3, 1).reshape(-1, channels, 1, 1)
    return _asked(network, cells).reshape(images, rows, columns, -1).permute(0, 3, 1, 2)


def _logits_of_tokens(network: nn.Module, features: Tensor) -> Tensor:
    prefix = int(getattr(network, "num_prefix_tokens", 0))  # class, distillation and register tokens
    tokens = features[:, prefix:]  # (images, rows * columns, channels)
    images, count, channels = tokens.shape
    side = math.isqrt(count)
    if side * side != count:
        raise _unsuitable(network, f"its {count} tokens are no square")
    # Whichever of a sequence's tokens the head looks at, or averages, it is this one.
    cells = tokens.reshape(-1, 1, channels).expand(-1, prefix + 1, -1)
    return _asked(network, cells).reshape(images, side, side, -1).permute(0, 3, 1, 2)


def _asked(network: nn.Module, cells: Tensor) -> Tensor:
    logits: Any = network.forward_head(cells)  # type: ignore[operator]
    if not isinstance(logits, Tensor) or logits.ndim != 2 or len(logits) != len(cells):
        raise _unsuitable(network, "its head gives no logits of a single cell")
    return logits  # (cells, classes)


def _unsuitable(network: nn.Module, reason: str) -> UserError:
    return UserError(
        f"{type(network).__name__} cannot label parts of an image: {reason}. Take a convolutional network or "
        "a transformer over one grid of tokens as --teacher."
    )


def _of_run(folder: Path, weights: str, image_side: int, classes: int) -> tuple[nn.Module, int]:
    """Build the network of a run from its folder, or from one of its checkpoints."""
    settings = next(
        (
            above / SETTINGS_OF_RUN
            for above in (folder.resolve(), *folder.resolve().parents[:2])
            if (above / SETTINGS_OF_RUN).is_file()
        ),
        None,
    )
    if settings is None:
        raise UserError(
            f"{folder} is no folder of a run: there is no {SETTINGS_OF_RUN}. Name the network with --teacher "
            "and the folder with --teacher-weights."
        )
    chosen = load_recipe(str(settings))
    side = image_side or int(chosen["img_size"])
    return _ours(str(chosen["model"]), weights or str(folder), side, classes), side


def _ours(name: str, weights: str, image_side: int, classes: int) -> nn.Module:
    network = build_model(name, img_size=image_side, num_classes=classes, drop_path=0.0)
    load_weights(network, read_weights(weights), weights)
    return network


def _of_timm(name: str, weights: str, pretrained: bool, image_side: int, classes: int) -> Teacher:
    if not pretrained:
        _required(weights, name)
    facts = get_pretrained_cfg(name)
    if facts is None:
        raise UserError(f"timm knows no image size and colours of {name}. Take another --teacher.")
    side = image_side or (facts.test_input_size or facts.input_size)[-1]
    # Only what has a fixed size takes one when it is built.
    size = {"img_size": side} if facts.fixed_input_size else {}
    if pretrained:
        network = _downloaded(name, size)
    else:
        network = _with_weights(name, size, read_weights(weights), weights, classes)
    if network.num_classes != classes:
        raise UserError(
            f"the teacher {name} knows {network.num_classes} classes, the images have {classes} class "
            "folders. Labels are of use only where both are the same: take a teacher trained on these."
        )
    return _ready(network, name, side, facts.mean, facts.std)


def _downloaded(name: str, size: dict[str, int]) -> Any:
    try:
        return create_model(name, pretrained=True, **size)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"timm has no weights of {name} in its cache and cannot fetch them ({error}). Copy a file of "
            "weights here and name it with --teacher-weights."
        ) from None


def _with_weights(
    name: str, size: dict[str, int], state: dict[str, Tensor], source: str, classes: int
) -> Any:
    # timm itself adapts what it knows how to adapt, such as position embeddings; nothing may be left over.
    overlay = {"state_dict": state, "num_classes": classes, "label_offset": 0, "source": ""}
    try:
        return create_model(
            name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=classes, **size
        )
    except (KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"the weights in {source} do not fit {name} with {classes} classes: {reason}. Check --teacher, "
            "--teacher-weights and the class folders."
        ) from None


def _required(weights: str, name: str) -> str:
    if not weights:
        raise UserError(
            f"the teacher {name} has no weights yet. Name a file of them with --teacher-weights; for a model "
            "of timm, --teacher-pretrained takes those in its cache or fetches them."
        )
    return weights


def _ready(network: Any, name: str, side: int, mean: Any, std: Any) -> Teacher:
    network.eval().requires_grad_(False)
    digest = hashlib.sha256()
    for tensor in network.state_dict().values():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    teacher = f"{name} at {side} pixels, weights {digest.hexdigest()[:12]}"
    return Teacher(network, teacher, side, tuple(mean), tuple(std))
