"""Settings of classification that the command line leaves open, chosen for the model, the images and the
device.

Invariant: what a flag or a recipe sets is never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from horovod_volo.config.schema import Config, all_settings
from horovod_volo.models.build import our_name, spec_of, tokens_per_side

# Two CPU cores train volo_demo on about 300 images of 64 px a second: six minutes.
_IMAGES_ON_CPU = 100_000
# An assumption, because no GPU has been measured: about half an hour of VOLO-D1 at 224 px.
_IMAGES_ON_GPU = 2_000_000
_LEAST_STEPS = 20  # of an epoch, for which a batch becomes smaller
_GIB = 2**30
_SMALL_GPU_GIB = 20.0
_HIGHEST_RATE = 0.004

# As the demo's: few epochs of a small network need weak augmentation, and labels of tokens help.
_ON_CPU: Mapping[str, Any] = {
    "model": "volo_demo",
    "img_size": 64,
    "scale": (0.5, 1.0),
    "aa": "",
    "color_jitter": 0.2,
    "reprob": 0.0,
    "token_label": True,
    "dense_weight": 1.0,
    "mix_token": False,
    "clip_grad": 1.0,
}


class DeviceFacts(NamedTuple):
    """What the choice depends on, besides the images."""

    kind: str  # cpu or cuda
    gib: float = 0.0  # memory of a GPU
    has_bf16: bool = False


def device_facts(device: torch.device) -> DeviceFacts:
    """Return what the choice depends on."""
    if device.type == "cpu":
        return DeviceFacts("cpu")
    memory = torch.cuda.get_device_properties(device).total_memory / _GIB
    return DeviceFacts("cuda", memory, torch.cuda.is_bf16_supported())


def fit_to_model(config: Config) -> Config:
    """Return the settings without MixToken if the model has no tokens and MixToken was not asked for."""
    name = config.model.model
    # A model that has a twin with tokens is refused elsewhere, with the name of the twin.
    if "mix_token" in config.explicit or spec_of(name).stride or our_name(name) != name:
        return config
    warning = f"without MixToken, because {name} has no token logits"
    changed = _with(config, {"mix_token": False})
    return replace(changed, warnings=(*config.warnings, warning)) if config.objective.mix_token else changed


def with_token_size_warning(config: Config) -> Config:
    """Add a warning if --token-label-size is not the number of tokens per side, which is used instead."""
    size, side = config.objective.token_label_size, tokens_per_side(config.model.model, config.model.img_size)
    if not config.objective.token_label or size in (0, side):
        return config
    warning = (
        f"--token-label-size {size} does not fit --img-size {config.model.img_size}: "
        f"the network has {side} x {side} tokens, so {side} is used"
    )
    return replace(config, warnings=(*config.warnings, warning))


def choose_settings(config: Config, images: int, ranks: int, device: DeviceFacts) -> Config:
    """Return the settings with a model, its image size, a batch and a schedule for what is at hand."""
    if device.kind == "cpu":
        chosen: dict[str, Any] = dict(_ON_CPU)
        batch = 16
        epochs = max(1, min(60, _IMAGES_ON_CPU // images))
    else:
        precision = "bf16" if device.has_bf16 else "fp16"
        chosen = {"model": "volo_d1", "img_size": 224, "precision": precision}
        batch = 128 if device.gib > _SMALL_GPU_GIB else 32
        epochs = max(30, min(300, _IMAGES_ON_GPU * ranks // images))
    while batch > 1 and images < _LEAST_STEPS * batch * ranks:
        batch //= 2
    chosen |= {"batch_size": batch, "epochs": epochs, "cooldown_epochs": 0}
    chosen["warmup_epochs"] = min(20, -(-epochs // 15)) if epochs > 1 else 0
    if config.explicit & {"epochs", "warmup_epochs", "cooldown_epochs"}:
        chosen = {name: value for name, value in chosen.items() if "epochs" not in name}
    if config.explicit & {"mixup", "cutmix"}:
        chosen |= {"mix_token": False, "token_label": False}
    chosen = {name: value for name, value in chosen.items() if name not in config.explicit}
    if not config.explicit & {"lr", "lr_base", "lr_base_size", "min_lr", "warmup_lr"}:
        batch = chosen.get("batch_size", config.data.batch_size)
        chosen |= _learning_rates(
            config.data.global_batch or ranks * batch * config.update.accumulation, device
        )
    return replace(_with(config, chosen), chosen=_description(chosen, images, device))


def _learning_rates(global_batch: int, device: DeviceFacts) -> dict[str, Any]:
    """Return the learning rates, proportional to the global batch: on a CPU the demo's, else VOLO's."""
    peak = 0.002 * global_batch / 32 if device.kind == "cpu" else 0.0016 * global_batch / 1024
    peak = min(peak, _HIGHEST_RATE)
    return {"lr_base": peak, "lr_base_size": global_batch, "min_lr": peak / 100, "warmup_lr": peak / 1000}


def _description(chosen: Mapping[str, Any], images: int, device: DeviceFacts) -> str:
    why = "the CPU" if device.kind == "cpu" else f"a GPU of {device.gib:.0f} GiB"
    texts = {
        "model": "{}",
        "img_size": "images of {} px",
        "batch_size": "{} of them a batch",
        "epochs": "{} epochs",
        "precision": "{}",
    }
    shown = [text.format(chosen[name]) for name, text in texts.items() if name in chosen]
    return (
        f"{', '.join(shown)}: for {why} and {images:,} images. --model, --epochs, ... or --recipe set others"
    )


def _with(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return the settings with others by name, in whatever group they are."""
    for setting in all_settings():
        if setting.name in changes:
            group = replace(getattr(config, setting.group), **{setting.name: changes[setting.name]})
            config = replace(config, **{setting.group: group})
    return config
