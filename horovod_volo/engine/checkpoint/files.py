"""Checkpoint folders: whole or absent.

A checkpoint is written beside its place, flushed to the disk and renamed; `state.json` holds the
checksum of every other file and of its own facts, so that a damaged one is told from a good one.
`last` and `best` are links, replaced in one operation.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from horovod_volo.core.atomic_file import flush
from horovod_volo.core.errors import UserError

Files = Mapping[str, Mapping[str, Tensor]]
FORMAT = 1


def write_checkpoint(folder: Path, step: int, files: Files, facts: dict[str, Any]) -> Path:
    """Publish a checkpoint of `step` in `folder` and point `last` at it; return its path."""
    final = checkpoint_path(folder, step)
    partial = folder / f".{final.name}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left_by_a_kill in folder.glob(".step_*.partial"):
            shutil.rmtree(left_by_a_kill)
        partial.mkdir()
        checksums = {name: _write_tensors(partial / f"{name}.safetensors", files[name]) for name in files}
        state = {"format": FORMAT, "step": step, **facts, "sha256": checksums}
        content = json.dumps(state | {"checksum": _checksum_of_facts(state)}, indent=2)
        _write_durably(partial / "state.json", content.encode())
        flush(partial)
        _remove(final)  # of the same step in an earlier life of this run
        partial.replace(final)
        flush(folder)
        point(folder / "last", final)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"Checkpoint {final} could not be written: {error}. Earlier checkpoints are intact; "
            "make room or mend the folder, then start again with --resume auto."
        ) from None
    return final


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies, or would lie; names sort as steps do."""
    return folder / f"step_{step:08}"


def point(link: Path, checkpoint: Path) -> None:
    """Make `link` lead to a checkpoint beside it, in one operation."""
    partial = link.with_name(f".{link.name}.partial")
    partial.unlink(missing_ok=True)
    partial.symlink_to(checkpoint.name)
    partial.replace(link)


def prune(saved: Path, keep: int) -> None:
    """Remove all but the one just saved, the `keep - 1` before it, and the one that `best` leads to."""
    folder = saved.parent
    best = (folder / "best").resolve()
    # A later one is damaged: the run went on from before it.
    kept = [path for path in sorted(folder.glob("step_*")) if path.name <= saved.name][-keep:]
    for path in folder.glob("step_*"):
        if path not in kept and path.resolve() != best:
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
        if state.pop("checksum") != _checksum_of_facts(state):
            return "state.json does not match its checksum"
        if state["format"] != FORMAT:
            return f"its format is {state['format']}, this trainer reads {FORMAT}"
        for name, expected in state["sha256"].items():
            if _checksum(path / f"{name}.safetensors") != expected:
                return f"{name}.safetensors does not match its checksum"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__} {error}"
    return None


def read_state(path: Path) -> dict[str, Any]:
    """Read a checkpoint's facts."""
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    if not isinstance(state, dict):
        raise ValueError("state.json holds no facts by name")
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
    path.chmod(path.parent.stat().st_mode & 0o666)  # as for any new file; safetensors makes it private
    flush(path)
    return _checksum(path)


def _checksum_of_facts(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_durably(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    flush(path)


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
