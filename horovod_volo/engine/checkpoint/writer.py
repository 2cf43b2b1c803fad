"""Writes checkpoints on a thread of its own, so that training goes on meanwhile.

Given live tensors, it copies them to host memory at once; the copies are kept for the next checkpoint.
Writing them, with checksums and flushes to disk, takes seconds for a large model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

import torch
from torch import Tensor

from horovod_volo.engine.checkpoint.files import StateDicts


class CheckpointWriter:
    """Writes one checkpoint at a time. Every rank has one; only rank 0's copies and writes."""

    def __init__(self) -> None:
        self.step = -1  # of the last checkpoint that was begun, on every rank
        self._copies: dict[tuple[str, str], Tensor] = {}
        self._thread: ThreadPoolExecutor | None = None
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
        copies = self._copied(tensors)
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing = self._thread.submit(write, copies)

    def done_within(self, seconds: float) -> bool:
        """Wait for the checkpoint under way, at most so long; return whether none is left."""
        return self._writing is None or bool(wait_for([self._writing], seconds).done)

    def wait(self) -> Sequence[str]:
        """Wait until the checkpoint is on disk; return warnings of the function that wrote it, or raise."""
        writing, self._writing = self._writing, None
        return () if writing is None else writing.result()

    def close(self) -> None:
        """Wait for the thread, and end it."""
        if self._thread is not None:
            self._thread.shutdown()

    @torch.no_grad()
    def _copied(self, tensors: StateDicts) -> StateDicts:
        self._copies = {
            (file, name): self._copy(self._copies.get((file, name)), tensor)
            for file, of_file in tensors.items()
            for name, tensor in of_file.items()
        }
        synchronize(tensor for of_file in tensors.values() for tensor in of_file.values())
        return {
            file: {name: self._copies[file, name] for name in of_file} for file, of_file in tensors.items()
        }

    @staticmethod
    def _copy(copy: Tensor | None, tensor: Tensor) -> Tensor:
        # A copy of its own for each: batch-norm statistics are views of one flat tensor, and safetensors
        # refuses to store views. A GPU copies to pinned memory without the host.
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return copy.copy_(tensor, non_blocking=True)


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Wait for the copies from a GPU."""
    if any(tensor.is_cuda for tensor in tensors):
        torch.cuda.current_stream().synchronize()
