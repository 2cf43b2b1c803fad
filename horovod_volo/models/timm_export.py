"""Exports a model to a folder that timm loads like a model from the Hugging Face hub.

Invariant: timm's model of the folder gives the same logits up to rounding; `timm_difference` measures that.
"""

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from horovod_volo.config.setting import keyword_arguments
from horovod_volo.core.atomic_file import flush, make_folder
from horovod_volo.core.errors import UserError
from horovod_volo.models.build import spec_of
from horovod_volo.models.pretrained import PretrainedModel
from horovod_volo.models.registry import registered_model
from horovod_volo.models.timm_api import create_model, get_pretrained_cfg, is_model
from horovod_volo.models.weights_header import PixelStatistics, header_of

WEIGHTS, CONFIG, ONNX = "model.safetensors", "config.json", "model.onnx"
STATE_DICT = "model.pth"  # of a network for pixels or boxes
_EXPORT_FILES = {WEIGHTS, CONFIG, ONNX, f"{ONNX}.data", STATE_DICT}

_METADATA_OF_TIMM = ("fixed_input_size", "pool_size", "first_conv", "classifier")


def check_folder(folder: Path, *, replace: bool) -> None:
    """Raise UserError if an export cannot be written to this folder."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file. Name a folder for the export.")
    inside = {path.name for path in folder.iterdir()}
    others = sorted(inside - _EXPORT_FILES if CONFIG in inside else inside)
    if others:
        raise UserError(f"{folder} holds files that are not of an export ({others[0]}). Name another folder.")
    if inside and not replace:
        raise UserError(f"There is an export in {folder} already. Name another folder, or add --force.")


@contextmanager
def atomic_folder(folder: Path, *, replace: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes `folder` at the end of the block, or is removed if it raises."""
    folder = folder.resolve()
    make_folder(folder.parent)
    beside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.partial")
    replaced = beside.with_suffix(".replaced")
    beside.mkdir()
    try:
        yield beside
        for file in beside.iterdir():
            file.chmod(beside.stat().st_mode & 0o666)  # safetensors writes files for their owner alone
            flush(file)
        flush(beside)
        check_folder(folder, replace=replace)  # again: another process may have created it
        if folder.exists() and replace:
            folder.replace(replaced)
        beside.replace(folder)
        flush(folder.parent)
    finally:
        if replaced.exists() and not folder.exists():  # the new one could not take its place
            replaced.replace(folder)
        shutil.rmtree(beside, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


def write_timm_folder(trained: PretrainedModel, folder: Path) -> None:
    """Write the weights and config.json of a model."""
    # Copies, as safetensors does not store tensors that share memory.
    state = {name: tensor.contiguous().clone() for name, tensor in trained.network.state_dict().items()}
    statistics = PixelStatistics(trained.mean, trained.std)
    header = header_of(trained.class_names, statistics, trained.crop_mode, trained.crop_pct)
    save_file(state, folder / WEIGHTS, metadata=header)
    text = json.dumps(config_of(trained), indent=2)
    (folder / CONFIG).write_text(f"{text}\n", encoding="utf-8")


def config_of(trained: PretrainedModel) -> dict[str, Any]:
    """Return timm's config.json of a model."""
    spec, side, known = spec_of(trained.name), trained.image_side, timm_name(trained)
    arguments: dict[str, Any] = {}  # of the constructor, besides the number of classes
    metadata: dict[str, Any] = {"fixed_input_size": True, "pool_size": None}
    if known:
        published = get_pretrained_cfg(known).to_dict()
        metadata = {key: published[key] for key in _METADATA_OF_TIMM if key in published}
        if published["input_size"][-1] != side:
            metadata |= {"pool_size": None} if "pool_size" in metadata else {}
            arguments = {"img_size": side} if published.get("fixed_input_size") else {}
    else:  # timm's functions for its architectures take no layers and widths, its classes do
        arguments = {"img_size": side, **spec.arguments}
    arguments |= keyword_arguments(trained.model_kwargs)
    if spec.stride and not trained.has_aux_head:
        arguments["use_aux_head"] = False
    if spec.stride or not known:
        metadata["classifier"] = [head for head in spec.heads if getattr(trained.network, head, None)]
    features = getattr(trained.network, "num_features", None)
    return {
        "architecture": known or trained.name,
        "num_classes": trained.num_classes,
        **({"num_features": features} if isinstance(features, int) else {}),
        **({"label_names": list(trained.class_names)} if trained.class_names else {}),
        **({"model_args": arguments} if arguments else {}),
        "pretrained_cfg": {
            **metadata,
            "interpolation": trained.interpolation,
            "input_size": (3, side, side),
            "mean": trained.mean,
            "std": trained.std,
            "crop_pct": trained.crop_pct,
            "crop_mode": trained.crop_mode,
            "num_classes": trained.num_classes,
        },
    }


def timm_name(trained: PretrainedModel) -> str:
    """Return timm's name of a model's architecture, or an empty string if timm has none."""
    spec = registered_model(trained.name)
    known = spec.timm_name if spec else trained.name.split(".")[0]  # timm's: ARCHITECTURE.WEIGHTS
    if spec and trained.model_kwargs:  # which timm's functions do not take
        return ""
    return known if is_model(known) else ""


def how_timm_loads(trained: PretrainedModel, folder: Path) -> str:
    """Return the line that tells the user how timm loads an export."""
    if timm_name(trained):
        return f'timm loads it: timm.create_model("local-dir:{folder}", pretrained=True)'
    name = f"{trained.name} {trained.model_kwargs}".rstrip()
    refused = f"timm.create_model cannot load it, as timm has no {name}"
    built = spec_of(trained.name).timm_class
    if built is None:
        return f"{refused}."
    full_name = f"{built.__module__}.{built.__qualname__}"
    return f"{refused}; {full_name} can, given num_classes and model_args of {CONFIG}."


def timm_difference(trained: PretrainedModel, folder: Path) -> float | None:
    """Return the largest difference from the logits of timm's model; None: timm cannot load it."""
    timm_class = spec_of(trained.name).timm_class
    if timm_name(trained):
        network: nn.Module = create_model(f"local-dir:{folder}", pretrained=True)
    elif timm_class:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        network = timm_class(num_classes=config["num_classes"], **config["model_args"])
        network.load_state_dict(load_file(folder / WEIGHTS))
    else:
        return None
    network.eval().requires_grad_(False)  # otherwise torch uses other kernels, which round differently
    images = fixed_images(2, trained.image_side)
    with torch.inference_mode():
        return float((network(images) - trained.network(images)).abs().max())


def fixed_images(count: int, height: int, width: int = 0) -> Tensor:
    """Return fixed random images with normalized pixels (count, 3, height, width); width 0: the height."""
    return torch.randn(count, 3, height, width or height, generator=torch.Generator().manual_seed(0))
