"""Weights in: from files of ours, timm's or the published ones, fitted to another input size.

Nothing is executed on load, and nothing is dropped in silence: what does not fit is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from horovod_volo.config.errors import UserError
from horovod_volo.models.volo import Volo

_HEADS = ("head.weight", "head.bias", "aux_head.weight", "aux_head.bias")


def load_weights(model: Volo, state: Mapping[str, Tensor], source: str) -> list[str]:
    """Load `state`, its position embedding resized to the model's; return what was adapted, in words."""
    own = model.state_dict()
    adapted: list[str] = []
    fitted = dict(state)
    if "pos_embed" in fitted and fitted["pos_embed"].shape != own["pos_embed"].shape:
        was, new = fitted["pos_embed"].shape, own["pos_embed"].shape
        if len(was) == len(new) and was[-1] == new[-1]:
            fitted["pos_embed"] = resize_position_embedding(fitted["pos_embed"], (new[1], new[2]))
            adapted.append(f"position embedding resized from {was[1]} x {was[2]} to {new[1]} x {new[2]}")
    _raise_on_mismatch(own, fitted, source)
    model.load_state_dict(fitted)
    return adapted


def resize_position_embedding(embedding: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resize a (1, rows, columns, channels) embedding bicubically, as the published fine-tuning does."""
    channels_first = embedding.permute(0, 3, 1, 2).float()  # (1, channels, rows, columns)
    resized = F.interpolate(channels_first, size=grid, mode="bicubic", align_corners=False)
    return resized.permute(0, 2, 3, 1).to(embedding.dtype)


def _raise_on_mismatch(own: Mapping[str, Tensor], given: Mapping[str, Tensor], source: str) -> None:
    missing = [name for name in own if name not in given]
    surplus = [name for name in given if name not in own]
    shapes = [name for name in own if name in given and own[name].shape != given[name].shape]
    if not (missing or surplus or shapes):
        return
    if shapes and set(shapes) <= set(_HEADS) and not (missing or surplus):
        raise UserError(
            f"The weights in {source} are for {given['head.weight'].shape[0]} classes, the model has "
            f"{own['head.weight'].shape[0]}. Give data with as many classes, or other weights."
        )
    facts = [
        f"{len(names)} {what} (first: {names[0]})"
        for names, what in ((missing, "missing"), (surplus, "unknown"), (shapes, "of another shape"))
        if names
    ]
    raise UserError(
        f"The weights in {source} are of another model: parameters {', '.join(facts)}. Check --model."
    )


def read_weights(path: str) -> dict[str, Tensor]:
    """Read a file of weights; of a folder, the weights of that checkpoint or run, or its only file."""
    file = _weights_file(Path(path))
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # each format raises its own kind; all mean the same to the user
        raise UserError(
            f"{file} cannot be read as weights ({type(error).__name__}): it is damaged, or holds other "
            "objects than tensors, which are never loaded."
        ) from None
    for key in ("state_dict_ema", "state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
            break
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise UserError(f"{file} holds no tensors by name. Save a model's state_dict() in it.")
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def _weights_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(
            f"There are no weights at {path}. --finetune takes a file, a checkpoint or a run folder."
        )
    for inside in (
        "model.safetensors",
        "checkpoints/best/model.safetensors",
        "checkpoints/last/model.safetensors",
    ):
        if (path / inside).is_file():
            return path / inside
    files = [file for file in path.iterdir() if file.suffix in (".safetensors", ".pth", ".pt", ".tar")]
    if len(files) != 1:
        raise UserError(f"{path} holds {len(files)} files of weights; name the one to --finetune from.")
    return files[0]
