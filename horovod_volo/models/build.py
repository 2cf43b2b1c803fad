"""A network from its name and size: ours, or any classification model of timm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from horovod_volo.config.validation import check_side
from horovod_volo.config.values import nearest
from horovod_volo.core.errors import UserError
from horovod_volo.models.lvvit import LVVIT_SIZES, LvVit
from horovod_volo.models.timm_api import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    create_model,
    get_pretrained_cfg,
    group_parameters,
    is_model,
    list_models,
)
from horovod_volo.models.volo import SIZES, TokenSwap, Volo

# Of a batch, the exchange of its tokens and a seed for drop path (64 bits): class logits (batch, classes),
# and token logits (batch, tokens, classes), of which a network without them has none.
Forward = Callable[[Tensor, TokenSwap, int], tuple[Tensor, Tensor]]

OUR_MODELS = (*SIZES, *LVVIT_SIZES)

# Side of the evaluation crop over side of the resized image. Above 1 the crop is larger than the
# image and is filled up with black.
_CROP_PCT = {"volo_d4": 1.15, "volo_d5": 1.15, "volo_demo": 1.0, "lvvit_t": 0.9, "lvvit_s": 0.9}
_CROP_PCT |= {"lvvit_m": 1.0, "lvvit_l": 1.0}
_USUAL_CROP_PCT = 0.96
_USUAL_SIDE = 224


@dataclass(frozen=True)
class Facts:
    """What a network expects of its images, by its name."""

    image_side: int
    crop_pct: float
    mean: tuple[float, ...]  # of colours from 0 to 1
    std: tuple[float, ...]
    interpolation: str  # by which they are resized: "bicubic" or "bilinear"


def check_model(name: str, *, img_size: int, tokens: bool) -> None:
    """Raise UserError where no network has this name and size, or it has no tokens to learn labels for."""
    if name in OUR_MODELS:
        check_side(img_size, f" for {name}")
    elif not is_model(name):
        hint = nearest(name, [*OUR_MODELS, *list_models()])
        raise UserError(f"There is no model {name!r}.{hint} Models: {', '.join(OUR_MODELS)}, and timm's.")
    elif tokens:
        own = our_name(name)
        instead = (
            f"Take --model {own}: its parameters are the same and it gives them."
            if own in OUR_MODELS
            else f"Add --no-token-label --no-mix-token, or take one of {', '.join(OUR_MODELS)}."
        )
        raise UserError(f"{name} is timm's and gives no logits of its tokens. {instead}")


def build_model(
    name: str,
    *,
    img_size: int,
    num_classes: int,
    drop_path: float,
    grad_checkpoint: bool = False,
    aux_head: bool = True,
) -> nn.Module:
    """Build a network with fresh weights from torch's current random state, on torch's current device.

    `aux_head` says whether VOLO and LV-ViT get the auxiliary head that gives logits of their tokens.
    """
    check_model(name, img_size=img_size, tokens=False)
    settings: dict[str, Any] = {"num_classes": num_classes}
    own: dict[str, Any] = {"img_size": img_size, "drop_path_rate": drop_path, "use_aux_head": aux_head}
    model: nn.Module
    if name in SIZES:
        model = Volo(**settings, **own, **SIZES[name])
    elif name in LVVIT_SIZES:
        model = LvVit(**settings, **own, **LVVIT_SIZES[name])
    else:
        model = _timms(name, img_size, drop_path, settings)
    if grad_checkpoint:
        _set_checkpointing(model, name)
    return model


def _timms(name: str, img_size: int, drop_path: float, settings: dict[str, Any]) -> nn.Module:
    facts = get_pretrained_cfg(name)
    if facts is not None and facts.fixed_input_size:  # only what has a fixed size takes one
        settings["img_size"] = img_size
    if drop_path:
        settings["drop_path_rate"] = drop_path
    try:
        model: nn.Module = create_model(name, **settings)
    except TypeError as error:  # timm's constructors refuse what they do not know by their own words
        raise UserError(f"timm does not build {name} with these settings: {error}.") from None
    except AssertionError as error:
        raise UserError(f"{name} does not take --img-size {img_size}: {error}.") from None
    return model


def _set_checkpointing(model: nn.Module, name: str) -> None:
    try:
        model.set_grad_checkpointing(True)  # type: ignore[operator]
    except (AttributeError, AssertionError):
        raise UserError(f"{name} has no activation checkpointing. Drop --grad-checkpoint.") from None


def training_forward(model: nn.Module) -> Forward:
    """Return the network's forward pass for training; without an auxiliary head there are no token logits."""
    if isinstance(model, Volo | LvVit):
        return model.class_logits if model.aux_head is None else model.training_logits
    return partial(_class_logits, model)


def _class_logits(
    model: nn.Module,
    images: Tensor,
    exchange: TokenSwap,  # noqa: ARG001
    drop_path_seed: int,
) -> tuple[Tensor, Tensor]:
    _seed_torch(
        images.device, drop_path_seed >> 1
    )  # timm's networks draw from torch's generator; it takes 63 bits
    logits: Tensor = model(images)
    return logits, logits.new_empty(len(logits), 0, logits.shape[-1])


def _seed_torch(device: torch.device, seed: int) -> None:
    # torch.manual_seed() would do, but it formats the whole call stack for devices that are not there,
    # which costs more than all else that a step does in Python.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def exempt_from_decay(model: nn.Module) -> set[str]:
    """Name the parameters that the network itself wants no weight decay for."""
    ask = getattr(model, "no_weight_decay", None)
    return set(ask()) if callable(ask) else set()


def layer_numbers(model: nn.Module) -> dict[str, int]:
    """Number each parameter's layer, from the stem up to the heads, as timm does."""
    match = getattr(model, "group_matcher", None)
    if not callable(match):
        raise UserError(f"{type(model).__name__} does not tell its layers apart. Drop --layer-decay.")
    numbers: dict[str, int] = group_parameters(model, match(coarse=False), reverse=True)
    return numbers


def our_name(name: str) -> str:
    """Return our name of one of timm's networks that is ours too, or the name as it is."""
    own = name.split(".")[0].rsplit("_", 1)[0]  # timm's: NETWORK_SIDE.WEIGHTS
    return own if own in OUR_MODELS else name


def facts_of(name: str) -> Facts:
    """Return what a network was published with."""
    timms = None if name in OUR_MODELS else get_pretrained_cfg(name)
    if timms is None:
        crop = _CROP_PCT.get(name, _USUAL_CROP_PCT)
        return Facts(_USUAL_SIDE, crop, IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, "bicubic")
    side = (timms.test_input_size or timms.input_size)[-1]
    interpolation = "bilinear" if timms.interpolation == "bilinear" else "bicubic"
    return Facts(side, timms.test_crop_pct or timms.crop_pct, timms.mean, timms.std, interpolation)


def heads_of(name: str) -> tuple[str, ...]:
    """Name the modules of a network that give logits."""
    timms = None if name in OUR_MODELS else get_pretrained_cfg(name)
    if timms is None:
        return ("head", "aux_head")
    return timms.classifier if isinstance(timms.classifier, tuple) else (timms.classifier,)
