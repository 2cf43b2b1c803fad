"""Weights in: from files of ours, timm's or the published ones, fitted to another input size.

Nothing is executed on load, and nothing is dropped in silence: what does not fit is an error, unless it was
allowed by name, or is a head of another number of classes, which begins anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from horovod_volo.core.errors import UserError
from horovod_volo.models.aux_head import AUX_HEAD
from horovod_volo.models.build import spec_of
from horovod_volo.models.registry import State
from horovod_volo.models.timm_api import downloaded_weights

TIMM = "timm:"
_RAW_FILE, _EMA_FILE = "model.safetensors", "ema.safetensors"  # of a checkpoint
_RAW_KEYS, _EMA_KEYS = ("state_dict", "model"), ("state_dict_ema", "model_ema")  # of timm's and DeiT's
_FILES_OF_A_FOLDER = (
    _RAW_FILE,
    f"checkpoints/best/{_RAW_FILE}",
    f"checkpoints/last/{_RAW_FILE}",
)


class Weights(NamedTuple):
    """Tensors by name, and which of several that lie in one place they are, in words."""

    tensors: dict[str, Tensor]
    remarks: list[str]


def load_weights(model: nn.Module, name: str, state: State, source: str, *, allowed: str = "") -> list[str]:
    """Load `state` into a network called `name`; return what was taken, adapted and left out, in words.

    `allowed` are beginnings of parameters' names, with commas between, that may stay fresh or be left out.
    """
    own = model.state_dict()
    spec = spec_of(name)
    given, remarks = spec.adapt_weights(model, state)
    left = _other_heads(own, given, spec.heads)
    if left:
        remarks.append(
            f"{', '.join(sorted({key.rsplit('.', 1)[0] for key in left}))} begin anew: the weights are for "
            f"{len(given[left[0]])} classes, the images have {len(own[left[0]])}"
        )
    if spec.stride:
        fresh, in_words = _fit_aux_head(own, given)
        left += fresh
        remarks += in_words
    beginnings = tuple(part.strip() for part in allowed.split(",") if part.strip())
    misfits = _misfits(own, given, left)
    _raise_on(
        {what: [k for k in keys if not k.startswith(beginnings)] for what, keys in misfits.items()}, source
    )
    # From here on every misfit is an allowed one.
    remarks += [
        f"{len(keys)} tensors {what}, as allowed: {_few(keys)}" for what, keys in misfits.items() if keys
    ]
    out = {*left, *misfits["unknown"], *misfits["of another shape"]}
    taken = {key: tensor for key, tensor in given.items() if key not in out}
    model.load_state_dict(taken, strict=False)  # what it lacks was judged above
    return [f"{len(taken)} of {len(own)} tensors taken", *remarks]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def _fit_aux_head(own: State, given: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Drop an auxiliary head that the model lacks; of one that the weights lack, name the tensors."""
    ours, theirs = ([key for key in state if key.startswith(AUX_HEAD)] for state in (own, given))
    if theirs and not ours:
        for key in theirs:
            del given[key]
        return [], [
            "aux_head is left out: without token labels it is not trained, and evaluation does without"
        ]
    if ours and not theirs:
        return ours, ["aux_head begins anew: the weights have none"]
    return [], []


def _other_heads(own: State, given: State, heads: tuple[str, ...]) -> list[str]:
    """Name the heads' tensors if they are for another number of classes."""
    keys = [f"{head}.{part}" for head in heads for part in ("weight", "bias")]
    present = [key for key in keys if key in own and key in given]
    others = [key for key in present if len(own[key]) != len(given[key])]
    alike = all(own[key].shape[1:] == given[key].shape[1:] for key in present)
    return others if others == present and alike else []


def _misfits(own: State, given: State, left: list[str]) -> dict[str, list[str]]:
    return {
        "missing": [key for key in own if key not in given and key not in left],
        "unknown": [key for key in given if key not in own],
        "of another shape": [
            key for key in own if key in given and key not in left and own[key].shape != given[key].shape
        ],
    }


def _raise_on(misfits: dict[str, list[str]], source: str) -> None:
    facts = [f"{len(keys)} {what} (first: {keys[0]})" for what, keys in misfits.items() if keys]
    if facts:
        raise UserError(
            f"The weights in {source} are of another model: parameters {', '.join(facts)}. Check --model, or "
            "name what may differ with --allow-mismatch."
        )


def read_weights(source: str, *, use_ema: bool = False) -> Weights:
    """Read a file of weights; of a folder, the weights of that checkpoint or run, or its only file.

    `timm:NAME` stands for the weights that timm publishes under that name. Where raw and averaged weights lie
    together, the raw ones are taken unless `use_ema` asks for the others.
    """
    if source.startswith(TIMM):
        if use_ema:
            raise _no_averages(source)
        return Weights(downloaded_weights(source.removeprefix(TIMM)), [])
    file = weights_file(Path(source))
    if file.suffix == ".safetensors":
        return _of_checkpoint(file, source, use_ema=use_ema)
    content = _read(file)
    if not isinstance(content, dict):
        raise _no_names(file)
    raw, averaged = (
        next((key for key in keys if isinstance(content.get(key), dict)), "")
        for keys in (_RAW_KEYS, _EMA_KEYS)
    )
    if use_ema and not averaged:
        raise _no_averages(source)
    taken = averaged if use_ema else raw or averaged
    state = content[taken] if taken else content
    if not all(isinstance(name, str) for name in state):
        raise _no_names(file)
    tensors = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    return Weights(tensors, _which(taken == averaged, raw, averaged) if averaged else [])


def _of_checkpoint(file: Path, source: str, *, use_ema: bool) -> Weights:
    """Read one of the files of a checkpoint of ours, or another one of their kind."""
    averaged = file if file.name == _EMA_FILE else file.with_name(_EMA_FILE)
    there = file.name in (_RAW_FILE, _EMA_FILE) and averaged.is_file()
    if use_ema and not there:
        raise _no_averages(source)
    taken = averaged if use_ema else file
    remarks = _which(taken == averaged, _RAW_FILE, _EMA_FILE) if there else []
    return Weights(_read(taken), remarks)


def _which(averaged_taken: bool, raw: str, averaged: str) -> list[str]:
    if averaged_taken:
        return [f"averaged weights ({averaged})"]
    return [f"raw weights ({raw}); --use-ema takes the averaged ones ({averaged})"]


def _read(file: Path) -> Any:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        # The published training code keeps its parsed arguments beside the weights: plain values.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # each format raises its own kind; all mean the same to the user
        raise UserError(
            f"{file} cannot be read as weights ({type(error).__name__}): it is damaged, or holds other "
            "objects than tensors, which are never loaded."
        ) from None


def _no_names(file: Path) -> UserError:
    return UserError(f"{file} holds no tensors by name. Save a model's state_dict() in it.")


def _no_averages(source: str) -> UserError:
    return UserError(f"There are no averaged weights of {source}. Drop --use-ema.")


def weights_file(path: Path) -> Path:
    """Return the file of weights that a path means."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise UserError(
            f"There are no weights at {path}. Name a run folder, a checkpoint, a file, or timm:NAME for "
            "timm's own."
        )
    for inside in _FILES_OF_A_FOLDER:
        if (path / inside).is_file():
            return path / inside
    files = [file for file in path.iterdir() if file.suffix in (".safetensors", ".pth", ".pt", ".tar")]
    if len(files) != 1:
        raise UserError(f"{path} holds {len(files)} files of weights; name one of them.")
    return files[0]
