"""Collective operations: Horovod's, and those of a single process.

Every rank calls the same methods in the same order. With one rank, `LocalCollectives` makes each method the
identity, so that callers do not have to distinguish the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from horovod_volo.cluster.horovod_build import read_build

Wait = Callable[[], None]
WaitForResult = Callable[[], Tensor]
_POLL_SECONDS = 1e-4


class RankLostError(RuntimeError):
    """Another rank has exited; that rank or the launcher prints the reason."""


class Collectives(Protocol):
    """The collective operations that this project needs. An `_async` method returns a function that waits."""

    def allreduce_async(self, tensor: Tensor, name: str, scale: float) -> Wait:
        """Replace `tensor` by `scale` times its sum over ranks."""

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> WaitForResult:
        """Sum a flat tensor over ranks and return the part of this rank, of `size` equal parts."""

    def allgather_async(self, part: Tensor, name: str) -> WaitForResult:
        """Concatenate the flat tensors of all ranks, which may differ in length, in the order of ranks."""

    def broadcast(self, tensor: Tensor, name: str) -> None:
        """Replace `tensor` by rank 0's."""

    def allgather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank."""

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's `value`."""


class LocalCollectives:
    """The collectives of a single rank."""

    def allreduce_async(self, tensor: Tensor, name: str, scale: float) -> Wait:  # noqa: ARG002
        if scale != 1.0:
            tensor.mul_(scale)
        return lambda: None

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> WaitForResult:  # noqa: ARG002
        return lambda: tensor

    def allgather_async(self, part: Tensor, name: str) -> WaitForResult:  # noqa: ARG002
        return lambda: part

    def broadcast(self, tensor: Tensor, name: str) -> None:
        pass

    def allgather_object(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        return value


class HorovodCollectives:
    """Horovod's collectives among the ranks that the launcher started."""

    def __init__(self) -> None:
        read_build()  # imports of a Horovod without PyTorch support raise nothing
        import horovod.torch as hvd

        hvd.init()
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.local_rank: int = hvd.local_rank()
        self.local_size: int = hvd.local_size()
        self.controller = "MPI" if hvd.mpi_enabled() else "gloo"
        self._hvd = hvd

    def allreduce_async(self, tensor: Tensor, name: str, scale: float) -> Wait:
        hvd = self._hvd
        with self._lost_rank_as_error():
            handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum, postscale_factor=scale)

        def wait() -> None:
            self._synchronize(handle)

        return wait

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> WaitForResult:
        hvd = self._hvd
        with self._lost_rank_as_error():
            handle = hvd.reducescatter_async(tensor, name=name, op=hvd.Sum)
        return lambda: self._synchronize(handle)

    def allgather_async(self, part: Tensor, name: str) -> WaitForResult:
        with self._lost_rank_as_error():
            handle = self._hvd.allgather_async(part, name=name)
        return lambda: self._synchronize(handle)

    def _synchronize(self, handle: int) -> Tensor:
        with self._lost_rank_as_error():
            # Horovod's synchronize() spins: it would take the core from the threads it waits for, and it
            # lets no signal handler run. So poll until the result is there.
            while not self._hvd.poll(handle):
                time.sleep(_POLL_SECONDS)
            result: Tensor = self._hvd.synchronize(handle)
        return result

    def broadcast(self, tensor: Tensor, name: str) -> None:
        # Horovod needs contiguous memory and supports neither bool nor bf16: broadcast the bytes.
        contiguous = tensor.detach().contiguous()
        with self._lost_rank_as_error():
            self._hvd.broadcast_(contiguous.view(-1).view(torch.uint8), root_rank=0, name=name)
        tensor.detach().copy_(contiguous)

    def allgather_object(self, value: Any) -> list[Any]:
        with self._lost_rank_as_error():
            # Horovod derives the default name from the type of the value. Ranks with values of different
            # types would wait for each other forever, so both methods for objects give a name.
            return list(self._hvd.allgather_object(value, name="gather"))

    def broadcast_object(self, value: Any) -> Any:
        with self._lost_rank_as_error():
            return self._hvd.broadcast_object(value, root_rank=0, name="object")

    @contextmanager
    def _lost_rank_as_error(self) -> Iterator[None]:
        try:
            yield
        except self._hvd.HorovodInternalError as error:
            raise RankLostError(f"another rank has exited ({error})") from None
