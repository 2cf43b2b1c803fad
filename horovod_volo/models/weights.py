"""Reads weights of this package, timm or the published code, and loads them into a model.

Invariants: loading executes no code, and drops nothing silently. A parameter that does not fit is an error,
unless it is allowed by name, or is a head of another number of classes, which is initialized.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from horovod_volo.core.atomic_file import file_sha256
from horovod_volo.core.errors import UserError
from horovod_volo.models.build import spec_of
from horovod_volo.models.registry import State
from horovod_volo.models.timm_api import downloaded_weights

TIMM = "timm:"
AUX_HEAD = "aux_head."  # prefix of its parameters' names in all published code
_RAW_FILE, _EMA_FILE = "model.safetensors", "ema.safetensors"  # of a checkpoint
_CHECKSUMS = "state.json"  # of the files of a checkpoint
_RAW_KEYS, _EMA_KEYS = ("state_dict", "model"), ("state_dict_ema", "model_ema")  # of timm's and DeiT's
_BEST, _LAST = "checkpoints/best", "checkpoints/last"  # of a run
_FILES_OF_A_FOLDER = (_RAW_FILE, f"{_BEST}/{_RAW_FILE}", f"{_LAST}/{_RAW_FILE}")


class Weights(NamedTuple):
    """Tensors by name, and a message that says whether they are raw or averaged weights (EMA)."""

    tensors: dict[str, Tensor]
    messages: list[str]


def load_weights(model: nn.Module, name: str, state: State, source: str, *, allowed: str = "") -> list[str]:
    """Load `state` into the model of this `name`; return messages on what was loaded, adapted and left out.

    `allowed` are comma-separated prefixes of parameters that may be missing, unknown or of another shape.
    """
    spec = spec_of(name)
    given, messages = spec.adapt_weights(model, state)
    fresh: list[str] = []
    if spec.stride:
        fresh, of_aux_head = _fit_aux_head(model.state_dict(), given)
        messages += of_aux_head
    counted, *others = load_fitted(model, given, source, heads=spec.heads, fresh=fresh, allowed=allowed)
    return [counted, *messages, *others]


def load_fitted(
    model: nn.Module,
    given: State,
    source: str,
    *,
    heads: tuple[str, ...],
    fresh: Sequence[str] = (),
    allowed: str = "",
) -> list[str]:
    """Load weights that were adapted to the model; return messages on what was loaded and left out.

    `fresh` tensors of the model keep their values. For `allowed` see `load_weights`.
    """
    own, messages = model.state_dict(), list[str]()
    left = _other_heads(own, given, heads)
    if left:
        messages.append(
            f"{', '.join(sorted({key.rsplit('.', 1)[0] for key in left}))} are initialized: the weights are "
            f"for {len(given[left[0]])} classes, the images have {len(own[left[0]])}"
        )
    left += fresh
    both = [key for key in own if key in given and key not in left]
    misfits = {
        "missing": [key for key in own if key not in given and key not in left],
        "unknown": [key for key in given if key not in own],
        "of another shape": [key for key in both if own[key].shape != given[key].shape],
    }
    prefixes = tuple(part.strip() for part in allowed.split(",") if part.strip())
    refused = {what: [k for k in keys if not k.startswith(prefixes)] for what, keys in misfits.items()}
    if any(refused.values()):
        found = [f"{len(keys)} {what} (first: {keys[0]})" for what, keys in refused.items() if keys]
        raise UserError(
            f"The weights in {source} are of another model: parameters {', '.join(found)}. Check --model, or "
            "name what may differ with --allow-mismatch."
        )
    messages += [
        f"{len(keys)} tensors {what}, as allowed: {', '.join(keys[:3])}{', ...' * (len(keys) > 3)}"
        for what, keys in misfits.items()
        if keys
    ]
    out = {*left, *misfits["unknown"], *misfits["of another shape"]}
    loaded = {key: tensor for key, tensor in given.items() if key not in out}
    model.load_state_dict(loaded, strict=False)  # missing tensors were checked above
    return [f"{len(loaded)} of {len(own)} tensors loaded", *messages]


def _fit_aux_head(own: State, given: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Drop an auxiliary head that the model lacks; return the tensors of a missing one, and messages."""
    ours, theirs = ([key for key in state if key.startswith(AUX_HEAD)] for state in (own, given))
    if theirs and not ours:
        for key in theirs:
            del given[key]
        return [], ["aux_head is left out: without token labels it is neither trained nor evaluated"]
    if ours and not theirs:
        return ours, ["aux_head is initialized: the weights have none"]
    return [], []


def _other_heads(own: State, given: State, heads: tuple[str, ...]) -> list[str]:
    """Return the names of the heads' tensors if they are for another number of classes."""
    keys = [f"{head}.{part}" for head in heads for part in ("weight", "bias")]
    present = [key for key in keys if key in own and key in given]
    others = [key for key in present if own[key].shape[:1] != given[key].shape[:1]]
    pairs = [(own[key], given[key]) for key in present]
    alike = all(a.dim() == b.dim() and a.shape[1:] == b.shape[1:] for a, b in pairs)
    return others if others == present and alike else []


def read_weights(source: str, *, use_ema: bool = False) -> Weights:
    """Read the weights of a file, of a folder (a checkpoint, a run, or one file), or timm:NAME.

    If there are raw and averaged weights (EMA), `use_ema` chooses the averaged ones.
    """
    if source.startswith(TIMM):
        if use_ema:
            raise _no_ema(source)
        return Weights(downloaded_weights(source.removeprefix(TIMM)), [])
    file = weights_file(Path(source))
    content: Any = {}
    if file.suffix == ".safetensors":
        is_ours = file.name in (_RAW_FILE, _EMA_FILE)
        raw, averaged = file.name, _EMA_FILE if is_ours and file.with_name(_EMA_FILE).is_file() else ""
    else:
        content = _read(file)
        parts = content if isinstance(content, dict) else {}
        found = [key for key, part in parts.items() if isinstance(part, dict)]
        raw, averaged = (next((key for key in keys if key in found), "") for keys in (_RAW_KEYS, _EMA_KEYS))
    if use_ema and not averaged:
        raise _no_ema(source)
    chosen = averaged if use_ema else raw or averaged
    if file.suffix == ".safetensors":
        file = file.with_name(chosen)
        _check_checksum(file)
        state = _read(file)
    else:
        state = content[chosen] if chosen else content
    _check_tensors(state, file)
    tensors = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    messages, folder = list[str](), Path(source)
    if (folder / _BEST).is_symlink() and file.parent == folder / _LAST:
        lacks = f"{folder / _BEST} lacks {_RAW_FILE}"
        messages.append(f"{lacks}, so the weights are those of {folder / _LAST}")
    if averaged:
        ema = f"averaged weights (EMA, {averaged})"
        messages.append(ema if chosen == averaged else f"raw weights ({raw}); --use-ema loads the {ema}")
    return Weights(tensors, messages)


def _check_tensors(state: Any, file: Path) -> None:
    """Raise UserError unless all values are dense tensors of floating-point numbers, or of counts."""
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in state.items()
    ):
        raise UserError(f"{file} holds no state_dict(). Save that of a model in it.")
    for name, tensor in state.items():
        is_dense = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_meta)
        if not is_dense or not (tensor.is_floating_point() or tensor.dtype == torch.int64):
            raise UserError(
                f"{name} in {file} is not a dense tensor of floating-point numbers. Convert it, and save it "
                "again."
            )


def _check_checksum(file: Path) -> None:
    """Raise UserError if the file is in a checkpoint and does not match the checksum there."""
    checksums = file.with_name(_CHECKSUMS)
    if not checksums.is_file():
        return
    try:
        intact = json.loads(checksums.read_bytes())["sha256"][file.stem] == file_sha256(file)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise UserError(
            f"{file} is damaged: it does not match its checksum in {_CHECKSUMS}. Copy this checkpoint again, "
            "or name another one of the run."
        )


def _read(file: Path) -> Any:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        # Published checkpoints hold the parsed arguments, plain values, beside the weights.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # each format raises other exceptions
        raise UserError(
            f"{file} cannot be read as weights ({type(error).__name__}): it is damaged, or holds "
            "objects other than tensors, which are never loaded."
        ) from None


def _no_ema(source: str) -> UserError:
    return UserError(f"There are no averaged weights (EMA) in {source}. Drop --use-ema.")


def weights_file(path: Path) -> Path:
    """Return the file of weights at a path: the file itself, or that of a checkpoint, run or other folder."""
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
