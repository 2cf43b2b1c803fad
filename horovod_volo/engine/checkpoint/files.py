"""The folder of a checkpoint, and the links `last` and `best`.

A checkpoint holds a safetensors file for each part of the training state, and `state.json`: the metadata, the
SHA-256 of each tensor file, and a checksum of `state.json` itself.
Invariant: a checkpoint is complete or absent. It is written into a hidden folder, flushed to disk and
renamed; the links are replaced atomically. One that is replaced stays beside it until then, as `.replaced`.
What a killed process leaves is cleaned up once, when the next one has the lock of the run folder.

`CheckpointWriter` writes on a thread of its own: checksums and flushes take seconds for a large model.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from horovod_volo.core.atomic_file import MayWrite, file_sha256, flush, json_sha256, remove_partials
from horovod_volo.core.errors import UserError

StateDicts = Mapping[str, Mapping[str, Tensor]]  # tensors by file and by name
FORMAT = 1
CHECKPOINTS = "checkpoints"  # their folder inside a run folder
_METADATA = "state.json"


def write_checkpoint(
    folder: Path,
    step: int,
    tensors: StateDicts,
    metadata: dict[str, Any],
    may_write: MayWrite = lambda: None,
    *,
    header: Mapping[str, str] = MappingProxyType({"format": "pt"}),
) -> Path:
    """Write the checkpoint of `step` into `folder` and update the link `last`; return its path.

    The tensors are on the CPU, contiguous, and no two share memory. `may_write` raises UserError if this
    process must not write; it is called before each change that others see, and a slow disk may delay them.
    """
    may_write()
    final = checkpoint_path(folder, step)
    replaced = folder / f".{final.name}.replaced"
    partial = folder / f".{final.name}.{uuid4().hex}.partial"  # of no process that wrote here before
    try:
        partial.mkdir(parents=True, exist_ok=True)
        checksums = {
            name: _write_tensors(partial / f"{name}.safetensors", tensors[name], dict(header))
            for name in tensors
        }
        state = {"format": FORMAT, "step": step, **metadata, "sha256": checksums}
        content = json.dumps(state | {"checksum": json_sha256(state)}, indent=2)
        (partial / _METADATA).write_text(content, encoding="utf-8")
        flush(partial / _METADATA)
        flush(partial)
        for record in folder.parent.glob("*.jsonl"):  # a run must not resume after steps that they lack
            flush(record)
        flush(folder.parent)
        may_write()  # since the folder exists: whoever takes the run folder over removes it
        if final.exists():  # this step was saved before the run resumed from an earlier one
            final.replace(replaced)
        partial.replace(final)
        flush(folder)
        update_link(folder / "last", final, may_write)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(
            f"Checkpoint {final} could not be written: {error}. Earlier checkpoints are intact: free disk "
            "space or fix the folder, then restart with --resume auto."
        ) from None
    return final


def clean_up(folder: Path) -> None:
    """Remove what another process left half written, also around `folder`, and put back what it replaced."""
    for interrupted in folder.glob(".*.partial"):
        if interrupted.is_symlink():
            interrupted.unlink()
        shutil.rmtree(interrupted, ignore_errors=True)
    for place in (folder.parent, *folder.glob("step_*")):
        remove_partials(place)
    for replaced, final in _replaced(folder).items():
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.replace(final)


def _replaced(folder: Path) -> dict[Path, Path]:
    """Return the checkpoints that were being replaced when a process was killed, with their usual paths."""
    return {path: folder / path.stem.lstrip(".") for path in folder.glob(".step_*.replaced")}


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step; paths sort by step."""
    return folder / f"step_{step:08}"


def update_link(link: Path, checkpoint: Path, may_write: MayWrite = lambda: None) -> None:
    """Make `link` point to a checkpoint in the same folder, atomically and on the disk."""
    partial = link.with_name(f".{link.name}.{uuid4().hex}.partial")
    partial.symlink_to(checkpoint.name)
    may_write()
    partial.replace(link)
    flush(link.parent)


def delete_old_checkpoints(saved: Path, keep: int) -> list[str]:
    """Delete all checkpoints but the one just saved, the `keep - 1` before it, and the target of `best`.

    Return a warning for each that cannot be deleted, as NFS refuses while a file of it is open elsewhere.
    """
    folder, warnings = saved.parent, []
    best = (folder / "best").resolve()
    # Checkpoints after the one just saved are damaged: the run resumed from an earlier one.
    kept = [path for path in sorted(folder.glob("step_*")) if path.name <= saved.name][-keep:]
    for path in folder.glob("step_*"):
        if path not in kept and path.resolve() != best:
            try:
                shutil.rmtree(path)
            except OSError as error:
                again = "this is tried again after the next checkpoint"
                warnings.append(f"{path} is not deleted: {error.strerror}; {again}")
    return warnings


def find_checkpoint(source: str) -> Path:
    """Return the checkpoint at `source`, or the newest intact one if `source` is a run folder."""
    path = Path(source)
    if (path / _METADATA).is_file():
        path = path.resolve()  # a link may be updated meanwhile
        if damage := find_damage(path):
            advice = "Resume from another checkpoint of the run."
            raise UserError(f"Checkpoint {path} is damaged: {damage}. {advice}")
        return path
    candidates = _saved(path)
    if not candidates:
        if (path / CHECKPOINTS / "last").is_symlink():
            raise UserError(
                f"{path} held checkpoints, but none is left. Restore them, or start a new run with another "
                "--name."
            )
        raise UserError(f"There is no checkpoint at {source}. --resume takes a run folder, --weights a file.")
    if intact := next(intact_checkpoints(path), None):
        return intact
    raise UserError(
        f"None of the {len(candidates)} checkpoints in {source} is intact: {find_damage(candidates[0])}."
    )


def intact_checkpoints(run_folder: Path) -> Iterator[Path]:
    """Yield the intact checkpoints of a run, the newest first."""
    return (checkpoint for checkpoint in _saved(run_folder) if find_damage(checkpoint) is None)


def find_later(checkpoint: Path) -> dict[Path, str | None]:
    """Return what is wrong with each later checkpoint in the same folder, as `find_damage` does."""
    later = (path for path in sorted(checkpoint.parent.glob("step_*")) if path.name > checkpoint.name)
    return {path: find_damage(path) for path in later}


def has_checkpoint(run_folder: Path) -> bool:
    """Return whether a run folder holds a checkpoint, intact or not, or has held one."""
    return bool(_saved(run_folder)) or (run_folder / CHECKPOINTS / "last").is_symlink()


def _saved(run_folder: Path) -> list[Path]:
    """Return a run's checkpoints, the newest first."""
    folder = run_folder / CHECKPOINTS
    replaced = [path for path, final in _replaced(folder).items() if not final.exists()]
    return sorted([*folder.glob("step_*"), *replaced], key=lambda path: path.name.lstrip("."), reverse=True)


def find_damage(path: Path) -> str | None:
    """Verify all checksums of a checkpoint; return what is wrong with it, or None."""
    try:
        state = read_metadata(path)
        if state.pop("checksum") != json_sha256(state):
            return f"{_METADATA} does not match its checksum"
        if state["format"] != FORMAT:
            return f"its format is {state['format']}, but this version reads {FORMAT}"
        if "model" not in state["sha256"]:
            return f"{_METADATA} names no model.safetensors"
        for name, expected in state["sha256"].items():
            if file_sha256(path / f"{name}.safetensors") != expected:
                return f"{name}.safetensors does not match its checksum"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{type(error).__name__} {error}"
    return None


def read_metadata(path: Path) -> dict[str, Any]:
    """Read `state.json` of a checkpoint."""
    state = json.loads((path / _METADATA).read_text(encoding="utf-8"))
    if not isinstance(state, dict):
        raise ValueError(f"{_METADATA} is not a JSON object")
    return state


def read_tensors(path: Path) -> dict[str, dict[str, Tensor]]:
    """Read a checkpoint's tensors by file and by name."""
    try:
        return {name: load_file(path / f"{name}.safetensors") for name in read_metadata(path)["sha256"]}
    except SafetensorError as error:
        raise UserError(f"Checkpoint {path} cannot be read: {error}.") from None


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], header: dict[str, str]) -> str:
    save_file(dict(tensors), path, metadata=header)
    path.chmod(path.parent.stat().st_mode & 0o666)  # the usual permissions: safetensors makes files private
    flush(path)
    return file_sha256(path)


class CheckpointWriter:
    """Writes one checkpoint at a time. Every rank has one; only rank 0's copies and writes."""

    def __init__(self) -> None:
        self.step = -1  # of the last checkpoint that was begun, on every rank
        self._copies: StateDicts = {}  # kept for the next checkpoint
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")  # begins at the first one
        self._writing: Future[Sequence[str]] | None = None

    @property
    def failed(self) -> bool:
        """Return whether the checkpoint under way could not be written."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    @property
    def is_writing(self) -> bool:
        """Return whether a checkpoint was begun whose end nobody has waited for."""
        return self._writing is not None

    def begin(self, tensors: StateDicts, write: Callable[[StateDicts], Sequence[str]]) -> None:
        """Copy the tensors, and let `write` write the copies; `wait` must have been called since the last."""
        assert self._writing is None
        self._writing = self._thread.submit(write, self._copied(tensors))

    def done_within(self, seconds: float) -> bool:
        """Wait for the checkpoint under way, at most so long; return whether none is left."""
        return self._writing is None or bool(wait_for([self._writing], seconds).done)

    def wait(self) -> Sequence[str]:
        """Wait until the checkpoint is on disk; return warnings of the function that wrote it, or raise."""
        writing, self._writing = self._writing, None
        return () if writing is None else writing.result()

    def close(self) -> None:
        """Wait for the thread, and end it."""
        self._thread.shutdown()

    @torch.no_grad()
    def _copied(self, tensors: StateDicts) -> StateDicts:
        # A copy of its own for each: batch-norm statistics are views of one flat tensor, and safetensors
        # refuses to store views. A GPU copies to pinned memory without the host.
        def copied(tensor: Tensor, earlier: Tensor | None) -> Tensor:
            if earlier is None or earlier.shape != tensor.shape or earlier.dtype != tensor.dtype:
                earlier = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            return earlier.copy_(tensor, non_blocking=True)

        before = self._copies
        self._copies = {
            file: {name: copied(tensor, before.get(file, {}).get(name)) for name, tensor in named.items()}
            for file, named in tensors.items()
        }
        if any(tensor.is_cuda for named in tensors.values() for tensor in named.values()):
            torch.cuda.current_stream().synchronize()
        return self._copies
