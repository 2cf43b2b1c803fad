"""Collective operations of Horovod, and how Horovod was built. Given a flat tensor and a name, an all-reduce
replaces it by its sum over ranks, which Horovod computes while the caller continues.

Every rank calls the same methods in the same order. With one rank each method is the identity: callers need
not distinguish the two.
"""

import contextlib
import ctypes
import io
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from horovod_volo.cluster.heartbeat import Heartbeat
from horovod_volo.core.errors import UserError

Wait = Callable[[], None]
WaitForResult = Callable[[], Tensor]
# A pause between two looks at a collective that is not done: a fiftieth of the wait so far. Short steps lose
# nothing, and a rank that waits long leaves its core to the others.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1e-4, 2e-3
BUILD = "horovod-volo build-horovod --install"
_REBUILD = f"Build it for the PyTorch that is installed: {BUILD}."
_MAX_VERSION_BYTES = 8192  # MPI_MAX_LIBRARY_VERSION_STRING of MPICH, the longest


class RankLostError(RuntimeError):
    """Another rank has exited, or does not answer; that rank or the launcher prints the reason."""


class HostsChangedError(Exception):
    """All ranks have agreed to end this set of ranks, because hosts have been added or are to leave."""


def _check_host_name() -> None:
    """Raise UserError if this host's name has no address: gloo would end in a segmentation fault."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except socket.gaierror:
        raise UserError(
            f"The name of this host, {name}, has no address, and gloo needs one. Add it to /etc/hosts or to "
            "the cluster's name service, or start the ranks with mpirun."
        ) from None


class Collectives:
    """The collective operations of a single rank; `HorovodCollectives` has those of several.

    An `_async` method returns a function that waits for the result.
    """

    heartbeat = Heartbeat()  # notes whether this rank waits for others

    def allreduce_async(self, tensor: Tensor, name: str, scale: float = 1.0) -> WaitForResult:  # noqa: ARG002
        """Replace `tensor` by `scale` times its sum over ranks, and return it."""
        if scale != 1.0:
            tensor.mul_(scale)
        return lambda: tensor

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> WaitForResult:  # noqa: ARG002
        """Sum a flat tensor over ranks and return this rank's 1/size of the sum."""
        return lambda: tensor

    def allgather_async(self, part: Tensor, name: str) -> WaitForResult:  # noqa: ARG002
        """Concatenate the flat tensors of all ranks, which may differ in length, in the order of ranks."""
        return lambda: part

    def broadcast_async(self, tensor: Tensor, name: str, root: int = 0) -> Wait:  # noqa: ARG002
        """Replace `tensor` by that of rank `root`."""
        return lambda: None

    def allgather_object(self, value: Any) -> list[Any]:
        """Return every rank's `value`, by rank."""
        return [value]


class HorovodCollectives(Collectives):
    """Horovod's collectives among the ranks that the launcher started."""

    def __init__(self) -> None:
        hvd = load_horovod()
        if os.environ.get("HOROVOD_CONTROLLER") == "gloo":
            _check_host_name()
        hvd.init()
        # The fields of World.
        self.position = {
            **{name: getattr(hvd, name)() for name in ("rank", "size", "local_rank", "local_size")},
            "controller": "MPI" if hvd.mpi_enabled() else "gloo",
        }
        self._hvd = hvd

    def allreduce_async(self, tensor: Tensor, name: str, scale: float = 1.0) -> WaitForResult:
        options = {"op": self._hvd.Sum, "postscale_factor": scale}
        return self._start(self._hvd.allreduce_async_, tensor, name=name, **options)

    def reduce_scatter_async(self, tensor: Tensor, name: str) -> WaitForResult:
        return self._start(self._hvd.reducescatter_async, tensor, name=name, op=self._hvd.Sum)

    def allgather_async(self, part: Tensor, name: str) -> WaitForResult:
        return self._start(self._hvd.allgather_async, part, name=name)

    def _start(self, operation: Callable[..., int], tensor: Tensor, **options: Any) -> WaitForResult:
        with self._lost_rank_as_error():
            handle = operation(tensor, **options)
        return lambda: self._synchronize(handle)

    def _synchronize(self, handle: int) -> Tensor:
        with self._lost_rank_as_error():
            # Horovod's synchronize() spins: it would take the core from the threads that it waits for, and no
            # signal handler could run. So poll until the result is there.
            if not self._hvd.poll(handle):
                self._wait_for(handle)
            result: Tensor = self._hvd.synchronize(handle)
        return result

    def _wait_for(self, handle: int) -> None:
        self.heartbeat.waits(True)
        began = time.monotonic()
        while not self._hvd.poll(handle):
            time.sleep(min(max((time.monotonic() - began) / 50, _SHORTEST_PAUSE), _LONGEST_PAUSE))
        self.heartbeat.waits(False)

    def broadcast_async(self, tensor: Tensor, name: str, root: int = 0) -> Wait:
        # Horovod needs contiguous memory and supports neither bool nor bf16: broadcast the bytes.
        contiguous = tensor.detach().contiguous()
        content = contiguous.view(-1).view(torch.uint8)
        wait_for_content = self._start(self._hvd.broadcast_async_, content, root_rank=root, name=name)

        def wait() -> None:
            wait_for_content()
            tensor.detach().copy_(contiguous)

        return wait

    def allgather_object(self, value: Any) -> list[Any]:
        # Horovod's own methods for objects call its synchronize(), twice one after the other.
        payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self.allgather_async(torch.tensor([len(payload)]), "object.sizes")
        payloads = self.allgather_async(payload, "object")()
        return [pickle.loads(part.numpy().tobytes()) for part in torch.split(payloads, sizes().tolist())]

    @contextlib.contextmanager
    def _lost_rank_as_error(self) -> Iterator[None]:
        try:
            yield
        except self._hvd.HorovodInternalError as error:
            timed_out = "timed out" in str(error).lower()
            reason = "does not answer: it hangs, or its host cannot be reached" if timed_out else "has exited"
            first_sentence, _, _ = str(error).partition(". ")
            raise RankLostError(f"another rank {reason} ({first_sentence})") from None


def load_horovod() -> Any:
    """Return `horovod.torch`; raise UserError where PyTorch cannot use Horovod."""
    try:
        # A Horovod without PyTorch support prints to stdout, which --json - reserves, and does not raise.
        with contextlib.redirect_stdout(io.StringIO()):
            import horovod
            import horovod.torch as hvd
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "horovod":
            raise
        raise UserError(
            f"Horovod is not installed in this Python, and several ranks need it. Build it: {BUILD}. "
            "One rank needs no Horovod: start it without --ranks and without a launcher."
        ) from None
    except (ImportError, OSError) as error:
        cause = str(error).splitlines()[0]
        raise UserError(f"Horovod does not load: {cause}. {_REBUILD}") from None
    if not hasattr(hvd, "init"):
        raise UserError(f"Horovod {horovod.__version__} was built without PyTorch. {_REBUILD}")
    return hvd


def mpi_library() -> str:
    """Return name and version of the MPI library that Horovod loaded; legal before MPI_Init."""
    text, length = ctypes.create_string_buffer(_MAX_VERSION_BYTES), ctypes.c_int()
    if ctypes.CDLL(None).MPI_Get_library_version(text, ctypes.byref(length)):
        return ""
    return text.value.decode(errors="replace").partition(",")[0].strip()


def leave_ranks() -> None:
    """End this process's part in the ranks that Horovod has connected, if it has."""
    load_horovod().shutdown()


def listen_for_hosts(listener: Any) -> None:
    """Let horovodrun's driver tell `listener.on_hosts_updated` of hosts that are added or removed."""
    from horovod.runner.elastic.worker import WorkerNotificationManager

    notifications = WorkerNotificationManager()
    notifications.init()
    notifications.register_listener(listener)
