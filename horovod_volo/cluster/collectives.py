"""The two ways to reach other ranks: Horovod, and having none.

Every rank calls the same methods in the same order. `LocalCollectives` is the identity of each, so
nobody has to ask whether there are others.
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
Arrive = Callable[[], Tensor]  # waits, and returns what has arrived
_POLL_SECONDS = 1e-4


class RankLostError(RuntimeError):
    """Another rank has left: what happened there is told by it, or by the launcher."""


class Collectives(Protocol):
    """What the project asks of a collective library. Each method is a collective."""

    def allreduce_async(self, tensor: Tensor, name: str, scale: float) -> Wait:
        """Begin to replace `tensor` by `scale` times its sum over ranks; the result waits for its end."""

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> Arrive:
        """Begin to sum a flat tensor over ranks, of which each receives its own of equal parts."""

    def allgather_async(self, part: Tensor, name: str) -> Arrive:
        """Begin to join every rank's flat tensor, of any length, in the order of ranks."""

    def broadcast(self, tensor: Tensor, name: str) -> None:
        """Replace `tensor` by rank 0's."""

    def allgather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank."""

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's `value`."""


class LocalCollectives:
    """A world of one."""

    def allreduce_async(self, tensor: Tensor, name: str, scale: float) -> Wait:  # noqa: ARG002
        if scale != 1.0:
            tensor.mul_(scale)
        return lambda: None

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> Arrive:  # noqa: ARG002
        return lambda: tensor

    def allgather_async(self, part: Tensor, name: str) -> Arrive:  # noqa: ARG002
        return lambda: part

    def broadcast(self, tensor: Tensor, name: str) -> None:
        pass

    def allgather_object(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        return value


class HorovodCollectives:
    """Horovod's collectives, as started by the launcher."""

    def __init__(self) -> None:
        read_build()  # an unfit Horovod is imported without an error
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
        with self._others_there():
            handle = hvd.allreduce_async_(tensor, name=name, op=hvd.Sum, postscale_factor=scale)

        def wait() -> None:
            self._arrived(handle)

        return wait

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> Arrive:
        hvd = self._hvd
        with self._others_there():
            handle = hvd.reducescatter_async(tensor, name=name, op=hvd.Sum)
        return lambda: self._arrived(handle)

    def allgather_async(self, part: Tensor, name: str) -> Arrive:
        with self._others_there():
            handle = self._hvd.allgather_async(part, name=name)
        return lambda: self._arrived(handle)

    def _arrived(self, handle: int) -> Tensor:
        with self._others_there():
            # Horovod's own wait spins: it takes the core from the threads that are waited for, and
            # lets no signal handler run.
            while not self._hvd.poll(handle):
                time.sleep(_POLL_SECONDS)
            result: Tensor = self._hvd.synchronize(handle)
        return result

    def broadcast(self, tensor: Tensor, name: str) -> None:
        # Horovod wants contiguous memory and knows neither bool nor bf16: bytes travel instead.
        contiguous = tensor.detach().contiguous()
        with self._others_there():
            self._hvd.broadcast_(contiguous.view(-1).view(torch.uint8), root_rank=0, name=name)
        tensor.detach().copy_(contiguous)

    def allgather_object(self, value: Any) -> list[Any]:
        with self._others_there():
            # Named, here and below: Horovod would name the message after the value's type, and ranks with
            # values of different types would wait for each other for ever.
            return list(self._hvd.allgather_object(value, name="gather"))

    def broadcast_object(self, value: Any) -> Any:
        with self._others_there():
            return self._hvd.broadcast_object(value, root_rank=0, name="share")

    @contextmanager
    def _others_there(self) -> Iterator[None]:
        try:
            yield
        except self._hvd.HorovodInternalError as error:
            raise RankLostError(f"a rank has left the ring ({error})") from None
