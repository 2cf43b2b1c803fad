"""Checkpoint folders: whole or absent.

A checkpoint is written beside its place, flushed to the disk and renamed; `state.json` holds the
checksum of every other file, so that a damaged one is told from a good one. `last` and `best`
are links, replaced in one operation.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from horovod_volo.config.errors import UserError

Files = Mapping[str, Mapping[str, Tensor]]
FORMAT = 1


def save_checkpoint(folder: Path, step: int, files: Files, facts: dict[str, Any]) -> Path:
    """Publish a checkpoint of `step` in `folder` and point `last` at it; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step_{step:08}"
    partial = folder / f".{final.name}.partial"
    _remove(partial)
    partial.mkdir()
    try:
        checksums = {name: _write_tensors(partial / f"{name}.safetensors", files[name]) for name in files}
        state = {"format": FORMAT, "step": step, **facts, "sha256": checksums}
        _write_durably(partial / "state.json", json.dumps(state, indent=2).encode())
        _flush_folder(partial)
        _remove(final)  # of the same step in an earlier life of this run
        partial.replace(final)
        _flush_folder(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"Checkpoint {final} could not be written: {error.strerror}. Earlier checkpoints are intact; "
            "make room or mend the folder, then start again with --resume auto."
        ) from None
    point(folder / "last", final)
    return final


def point(link: Path, checkpoint: Path) -> None:
    """Make `link` lead to a checkpoint beside it, in one operation."""
    partial = link.with_name(f".{link.name}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(checkpoint.name)
    partial.replace(link)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the one that `best` leads to."""
    best = (folder / "best").resolve()
    for path in sorted(folder.glob("step_*"))[:-keep]:
        if path.resolve() != best:
            shutil.rmtree(path)


def find_checkpoint(where: str) -> Path:
    """Return the newest whole checkpoint at a path: a checkpoint, or a run that has some."""
    path = Path(where)
    if (path / "state.json").is_file():
        return _must_be_whole(path.resolve())
    candidates = sorted((path / "checkpoints").glob("step_*"), reverse=True)
    if not candidates:
        raise UserError(f"There is no checkpoint at {where}. --resume takes a run folder or a checkpoint.")
    for candidate in candidates:
        if damage(candidate) is None:
            return candidate
    raise UserError(
        f"None of the {len(candidates)} checkpoints in {where} is whole: {damage(candidates[0])}."
    )


def has_checkpoint(run_folder: Path) -> bool:
    """Say whether a run has left a checkpoint, whole or not."""
    return any((run_folder / "checkpoints").glob("step_*"))


def _must_be_whole(path: Path) -> Path:
    wrong = damage(path)
    if wrong:
        raise UserError(f"Checkpoint {path} is damaged: {wrong}. Resume from another one beside it.")
    return path


def damage(path: Path) -> str | None:
    """Say what is wrong with a checkpoint, or None."""
    try:
        state = read_state(path)
        for name, expected in state["sha256"].items():
            if _checksum(path / f"{name}.safetensors") != expected:
                return f"{name}.safetensors does not match its checksum"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__} {error}"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint's facts."""
    state: dict[str, Any] = json.loads((path / "state.json").read_text(encoding="utf-8"))
    return state


def read_tensors(path: Path) -> dict[str, dict[str, Tensor]]:
    """Read a checkpoint's tensors by file and name."""
    try:
        return {name: load_file(path / f"{name}.safetensors") for name in read_state(path)["sha256"]}
    except SafetensorError as error:
        raise UserError(f"Checkpoint {path} cannot be read: {error}.") from None


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    # Copies: batch-norm statistics are views of one flat tensor, and safetensors refuses to store views.
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
    _flush(path)
    return _checksum(path)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_durably(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_flush_folder = _flush  # a folder's names are flushed the same way


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
