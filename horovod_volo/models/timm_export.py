"""Exports a model to a folder that timm loads like a model from the Hugging Face hub.

Invariant: timm's model of the folder gives the same logits up to rounding; `timm_difference` measures that.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from horovod_volo.core.atomic_file import flush
from horovod_volo.core.errors import UserError
from horovod_volo.models.build import spec_of
from horovod_volo.models.pretrained import PretrainedModel
from horovod_volo.models.registry import registered_model
from horovod_volo.models.timm_api import create_model, get_pretrained_cfg, is_model
from horovod_volo.models.weights_header import PixelStatistics, header_of

WEIGHTS, CONFIG, ONNX = "model.safetensors", "config.json", "model.onnx"
STATE_DICT = "model.pth"  # of a network for pixels or boxes
_EXPORT_FILES = {WEIGHTS, CONFIG, ONNX, f"{ONNX}.data", STATE_DICT}

_PRETRAINED_CFG_KEYS = ("fixed_input_size", "pool_size", "first_conv", "classifier")


def check_folder(folder: Path, *, replace: bool) -> None:
    """Raise UserError if an export cannot be written to this folder."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file. Name a folder for the export.")
    inside = {path.name for path in folder.iterdir()}
    others = sorted(inside - _EXPORT_FILES)
    if others:
        raise UserError(f"{folder} holds files that are not of an export ({others[0]}). Name another folder.")
    if inside and not replace:
        raise UserError(f"There is an export in {folder} already. Name another folder, or add --force.")


@contextmanager
def atomic_folder(folder: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` at the end of the block, or is removed if it raises."""
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        mode = folder.parent.stat().st_mode & 0o777  # a temporary folder is readable by its owner only
        beside.chmod(mode | 0o700)
        yield beside
        for file in beside.iterdir():
            file.chmod(mode & 0o666 | 0o600)
            flush(file)
        flush(beside)
        check_folder(folder, replace=replace)  # again: another process may have created it
        if folder.exists() and replace:
            folder.replace(beside.with_suffix(".replaced"))
        beside.replace(folder)
        flush(folder.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(beside.with_suffix(".replaced"), ignore_errors=True)


def write_timm_folder(trained: PretrainedModel, folder: Path) -> None:
    """Write the weights and config.json of a model."""
    # Copies, as safetensors does not store tensors that share memory.
    state = {name: tensor.contiguous().clone() for name, tensor in trained.network.state_dict().items()}
    header = PixelStatistics(trained.mean, trained.std).header(trained.crop_mode, trained.crop_pct)
    save_file(state, folder / WEIGHTS, metadata=header_of(trained.class_names) | header)
    text = json.dumps(config_of(trained), indent=2)
    (folder / CONFIG).write_text(f"{text}\n", encoding="utf-8")


def config_of(trained: PretrainedModel) -> dict[str, Any]:
    """Return timm's config.json of a model."""
    preprocessing = {
        "input_size": (3, trained.image_side, trained.image_side),
        "mean": trained.mean,
        "std": trained.std,
        "crop_pct": trained.crop_pct,
        "crop_mode": trained.crop_mode,
        "num_classes": trained.num_classes,
    }
    config: dict[str, Any] = {
        "architecture": architecture_of(trained.name),
        "num_classes": trained.num_classes,
    }
    features = getattr(trained.network, "num_features", None)
    if isinstance(features, int):
        config["num_features"] = features
    if trained.class_names:
        config["label_names"] = list(trained.class_names)
    arguments = _arguments(trained)
    if arguments:
        config["model_args"] = arguments
    return config | {"pretrained_cfg": _pretrained_cfg(trained) | preprocessing}


def architecture_of(name: str) -> str:
    """Return timm's name for a model's architecture; where timm has none, our own name."""
    spec = registered_model(name)
    if spec is None:
        return name.split(".")[0]  # timm's: ARCHITECTURE.WEIGHTS
    export = spec.export
    return export.architecture if export is not None and is_model(export.architecture) else name


def _arguments(trained: PretrainedModel) -> dict[str, Any]:
    """Return the constructor's arguments besides the number of classes."""
    architecture, spec = architecture_of(trained.name), spec_of(trained.name)
    head = {} if trained.has_aux_head or not spec.stride else {"use_aux_head": False}
    if not is_model(architecture):
        # timm's functions for its architectures take no layers and widths, its classes do.
        arguments = spec.export.arguments if spec.export else {}
        return {"img_size": trained.image_side, **arguments, **head}
    usual = get_pretrained_cfg(architecture)
    if not usual.fixed_input_size or usual.input_size[-1] == trained.image_side:
        return head
    return {"img_size": trained.image_side, **head}


def _pretrained_cfg(trained: PretrainedModel) -> dict[str, Any]:
    """Return the rest of timm's `pretrained_cfg`: mostly the names of the first and the last layers."""
    spec = registered_model(trained.name)
    if spec is not None:
        heads = [head for head in spec.heads if getattr(trained.network, head, None) is not None]
        timms: Mapping[str, Any] = {"fixed_input_size": True, "pool_size": None, "classifier": heads}
        if spec.export:
            timms = {**timms, "first_conv": spec.export.first_conv}
    else:
        timms = get_pretrained_cfg(trained.name).to_dict()
        side = timms["input_size"][-1]
        timms = timms if side == trained.image_side else {**timms, "pool_size": None}
    metadata = {key: timms[key] for key in _PRETRAINED_CFG_KEYS if key in timms}
    return metadata | {"interpolation": trained.interpolation}


def how_timm_loads(name: str, folder: Path) -> str:
    """Return the line that tells the user how timm loads an export."""
    if is_model(architecture_of(name)):
        return f'timm loads it: timm.create_model("local-dir:{folder}", pretrained=True)'
    refused = f"timm.create_model cannot load it, as timm has no {name}"
    constructor = _timm_constructor(name)
    if constructor is None:
        return f"{refused}."
    full_name = f"{constructor.__module__}.{constructor.__qualname__}"
    return f"{refused}; {full_name} can, given num_classes and model_args of {CONFIG}."


def _timm_constructor(name: str) -> Callable[..., nn.Module] | None:
    """Return timm's class for a model that timm has no architecture of, or None."""
    spec = registered_model(name)
    return spec.export.constructor if spec is not None and spec.export is not None else None


def timm_difference(trained: PretrainedModel, folder: Path) -> float | None:
    """Return the largest difference from the logits of timm's model; None: timm cannot load it."""
    network = _loaded_by_timm(folder)
    if network is None:
        return None
    network.eval().requires_grad_(False)  # otherwise torch uses other kernels, which round differently
    images = fixed_images(2, trained.image_side)
    with torch.inference_mode():
        return float((network(images) - trained.network(images)).abs().max())


def _loaded_by_timm(folder: Path) -> nn.Module | None:
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if is_model(config["architecture"]):
        known: nn.Module = create_model(f"local-dir:{folder}", pretrained=True)
        return known
    constructor = _timm_constructor(config["architecture"])
    if constructor is None:
        return None
    network = constructor(num_classes=config["num_classes"], **config.get("model_args", {}))
    network.load_state_dict(load_file(folder / WEIGHTS))
    return network


def fixed_images(count: int, height: int, width: int = 0) -> Tensor:
    """Return fixed random images with normalized pixels (count, 3, height, width); width 0: the height."""
    return torch.randn(count, 3, height, width or height, generator=torch.Generator().manual_seed(0))
