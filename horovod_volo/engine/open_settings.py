"""Settings of classification that the command line leaves open, chosen for the model, the images and the
device: a network that starts from published weights or, where there are none, from scratch.

Invariant: what a flag or a recipe sets is never changed.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from horovod_volo.config.recipe import load_recipe
from horovod_volo.config.schema import Config, all_settings
from horovod_volo.models.build import our_name, spec_of, tokens_per_side
from horovod_volo.models.pretrained import settings_of_run
from horovod_volo.models.weights import TIMM

# Two CPU cores train volo_demo on 210 (AVX2) to 800 images of 64 px a second (AVX-512): two to eight minutes.
_IMAGES_ON_CPU = 100_000
# An H200 trains VOLO-D1 on about 2,700 images of 224 px a second: twelve minutes.
_IMAGES_ON_GPU = 2_000_000
_LEAST_STEPS = 20  # of an epoch, for which a batch becomes smaller
_GIB = 2**30
_SMALL_GPU_GIB = 20.0
_HIGHEST_RATE, _HIGHEST_OF_MUON = 0.004, 0.012
_RATES = {"lr", "lr_base", "lr_base_size", "min_lr", "warmup_lr"}

# Its ImageNet accuracy, 81.6 % at 224 px, is the best of timm's networks for its time on a CPU.
_ON_CPU = "hgnetv2_b2.ssld_stage2_ft_in1k"


class DeviceFacts(NamedTuple):
    """What the choice depends on, besides the images."""

    kind: str  # cpu or cuda
    gib: float = 0.0  # memory of a GPU
    precision: str = "fp32"


def device_facts(device: torch.device) -> DeviceFacts:
    """Return what the choice depends on."""
    if device.type == "cpu":
        return DeviceFacts("cpu")
    memory = torch.cuda.get_device_properties(device).total_memory / _GIB
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return DeviceFacts("cuda", memory, "bf16" if has_bf16 else "fp16")


def fit_to_model(config: Config) -> Config:
    """Return the settings without MixToken if the model has no tokens and MixToken was not asked for."""
    name, is_stated = config.model.model, "mix_token" in config.explicit
    # A model that has a twin with tokens is refused elsewhere, with the name of the twin.
    if is_stated or not config.objective.mix_token or spec_of(name).stride or our_name(name) != name:
        return config
    warnings = (*config.warnings, f"without MixToken, because {name} has no token logits")
    return replace(_with(config, {"mix_token": False}), warnings=warnings)


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


def choose_settings(
    config: Config, images: int, ranks: int, device: DeviceFacts, why_missing: Callable[[str], str]
) -> Config:
    """Return the settings for what is at hand; `why_missing` tells why weights of timm cannot be had."""
    chosen, why = _from_weights(config, device, why_missing)
    if not chosen:
        chosen = _from_scratch(config, images, ranks, device)
    batch, least = chosen["batch_size"], 8 if chosen["finetune"] else 1  # batch norm needs some images
    while batch > 1 and images < ranks * batch * (_LEAST_STEPS if batch > least else 1):
        batch //= 2
    chosen["batch_size"] = batch
    if "epochs" in config.explicit:
        del chosen["epochs"], chosen["warmup_epochs"]
    if config.objective.mixup or config.objective.cutmix:
        chosen |= {"mix_token": False, "token_label": False}
    own_rates = _RATES if config.explicit & {"lr", "lr_base", "lr_base_size"} else set()
    chosen = {name: value for name, value in chosen.items() if name not in config.explicit | own_rates}
    if not own_rates:
        batch = ranks * chosen.get("batch_size", config.data.batch_size) * config.update.accumulation
        batch = config.data.global_batch or batch
        highest = _HIGHEST_OF_MUON if chosen.get("opt", config.update.opt) == "muon" else _HIGHEST_RATE
        factor = min(batch / chosen["lr_base_size"], highest / chosen["lr_base"])
        chosen |= {name: factor * chosen[name] for name in chosen.keys() & {"lr_base", "min_lr", "warmup_lr"}}
        chosen["lr_base_size"] = batch
    warnings = (*config.warnings, *([f"training begins from scratch, because {why}"] if why else []))
    complete = replace(_with(config, chosen), chooses_model=False, warnings=warnings)
    return replace(complete, chosen=_description(complete, chosen, images, device))


def _from_weights(
    config: Config, device: DeviceFacts, why_missing: Callable[[str], str]
) -> tuple[dict[str, Any], str]:
    """Return settings that start from weights, or none, and why if that was not requested."""
    source, on_cpu, given = config.model.finetune, device.kind == "cpu", config.explicit
    chosen = load_recipe("finetune_folder") | {"precision": device.precision}
    if on_cpu:  # a stop request waits for the features of a batch
        chosen |= {"model": _ON_CPU, "finetune": TIMM + _ON_CPU, "eval_batch_size": 16}
    tokens = config.objective.token_label or (config.objective.mix_token and "mix_token" in given)
    if source.startswith(TIMM):
        name = source.removeprefix(TIMM)
        chosen |= {"model": our_name(name), "img_size": spec_of(name).img_size}
    elif source:
        of_run = settings_of_run(source)
        chosen |= {name: of_run[name] for name in ("model", "img_size", "model_kwargs") if name in of_run}
    elif "finetune" in given:
        return {}, ""
    elif on_cpu and tokens:
        return {}, "token labels need a network with tokens; --weights starts from those of one"
    elif problem := why_missing(chosen["finetune"].removeprefix(TIMM)):
        return {}, (
            f"{chosen['finetune']} is not in timm's cache and cannot be downloaded ({problem}); copy its "
            "model.safetensors here and add --weights FILE"
        )
    chosen["fit_head"] = config.model.fit_head if "fit_head" in given else on_cpu and not tokens
    if on_cpu and chosen["fit_head"] and "epochs" not in given:
        chosen |= {"freeze": "backbone", "drop_path": 0.0, "epochs": 0, "warmup_epochs": 0}
    return chosen, ""


def _from_scratch(config: Config, images: int, ranks: int, device: DeviceFacts) -> dict[str, Any]:
    if device.kind == "cpu":
        chosen, epochs = load_recipe("fast_small"), max(1, min(60, _IMAGES_ON_CPU // images))
        chosen |= {"first_size": 0, "global_batch": 0, "batch_size": max(16, chosen["batch_size"] // ranks)}
        if config.explicit & {"opt", "shard_optimizer"} and config.update.opt != "muon":
            chosen |= {"opt": "adamw", "lr_base": 1e-3}
    else:
        chosen = {"model": "volo_d1", "img_size": 224, "precision": device.precision}
        chosen |= {"batch_size": 128 if device.gib > _SMALL_GPU_GIB else 32, "lr_base_size": 1024}
        chosen |= {"lr_base": 1.6e-3, "min_lr": 1.6e-5, "warmup_lr": 1.6e-6}
        epochs = max(30, min(300, _IMAGES_ON_GPU * ranks // images))
    warmup = min(20, -(-epochs // 15)) if epochs > 1 else 0
    return chosen | {"finetune": "", "epochs": epochs, "cooldown_epochs": 0, "warmup_epochs": warmup}


def _description(config: Config, chosen: Mapping[str, Any], images: int, device: DeviceFacts) -> str:
    why = "the CPU" if device.kind == "cpu" else f"a GPU of {device.gib:.0f} GiB"
    texts = {
        "model": "{}",
        "finetune": "with timm's weights" if config.model.finetune else "from scratch",
        "img_size": "images of {} px",
        "fit_head": "a classifier fitted to its features" if config.model.fit_head else "",
        "batch_size": "{} of them a batch" if config.update.epochs else "",
        "epochs": "{} epochs" if config.update.epochs else "",
        "precision": "{}",
    }
    shown = [text.format(chosen[name]) for name, text in texts.items() if text and name in chosen]
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
