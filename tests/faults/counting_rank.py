"""A rank of the trainer that starts in a moment, and notes what it does in `history.jsonl`.

Its network adds up small numbers that follow from the samples. Their means are exact, so the state after a
step is the same, bit for bit, on 1, 2 or 4 ranks. Replaced are the images, the network, and Horovod's
transport by a socket to `counting_launcher.py`; time limits are shorter. All else is the package's: the
entry, the engine, the order, the ledger, checkpoints, the lock, the log and what elastic ranks do.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import signal
import time
import uuid
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from horovod_volo.cluster import entry, watchdog, world
from horovod_volo.cluster.collectives import Collectives, RankLostError
from horovod_volo.cluster.step_statistics import Outcome
from horovod_volo.cluster.stop_signals import exit_at_once
from horovod_volo.core.rng import Purpose, bits_of_samples
from horovod_volo.data.ordered_batches import OrderedBatches, OrderOfRank
from horovod_volo.elastic import job
from horovod_volo.elastic import run as elastic_run
from horovod_volo.elastic.job import ElasticJob
from horovod_volo.engine import run, run_lock
from horovod_volo.engine.callbacks import Callback
from horovod_volo.engine.checkpoint import files
from horovod_volo.engine.classification import TASKS
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.run_lock import RunLock
from horovod_volo.engine.task import Learner, Network, TaskData
from horovod_volo.monitor.logger import AppendedFile
from horovod_volo.plugins import register_callback
from horovod_volo.train import main

SAMPLES, NUMBERS, LONGEST_WAIT_SECONDS = 24, 4, 15.0
STALE_SECONDS, STEP_SECONDS = 1.0, 0.02  # of a lock, and of a step


def note(folder: Path, event: str, **facts: Any) -> None:
    """Append an event to the history; all processes of a host have the same monotonic clock."""
    line = json.dumps({"time": time.monotonic(), "process": os.getpid(), "event": event, **facts})
    with (folder / "history.jsonl").open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


def process_state(process: int) -> str:
    """Return the letter of a process's state in /proc: T is stopped, Z has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def digest(tensors_by_file: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Return a hash of a training state."""
    found = hashlib.sha256()
    for file, tensors in sorted(tensors_by_file.items()):
        for name, tensor in sorted(tensors.items()):
            found.update(f"{file} {name}".encode() + tensor.numpy().tobytes())
    return found.hexdigest()[:16]


def states_of_checkpoints(run_folder: Path) -> dict[int, str]:
    """Return hashes of the intact checkpoints of a run, by step."""
    intact = files.intact_checkpoints(run_folder)
    return {int(path.name.removeprefix("step_")): digest(files.read_tensors(path)) for path in intact}


class CountingBatch(NamedTuple):
    """The samples of a micro-batch, and their numbers."""

    indices: Any
    drawn: Any
    numbers: Tensor


class CountingLoader(OrderedBatches[Any, Any]):
    """The order of the package, without images."""

    def batches(self, epoch: int, first_step: int) -> Iterator[CountingBatch]:
        for read in self._reads(epoch, first_step):
            yield read()

    def _read_batch(self, epoch: int, drawn: Any) -> CountingBatch:
        bits = bits_of_samples(Purpose.BOX_PLAN, 0, epoch, drawn)
        numbers = np.stack([bits >> np.uint64(8 * place) & np.uint64(63) for place in range(NUMBERS)], axis=1)
        return CountingBatch(drawn, drawn, torch.from_numpy(numbers.astype(np.float32)))

    def prepare_next(self) -> None:
        pass

    _pipeline = _transform = _batch = prepare_next  # nothing is decoded


class CountingLoss(NamedTuple):
    total: Tensor


class CountingLearner(Learner[CountingBatch, Tensor]):
    loss_names = CountingLoss._fields

    def __init__(self, config: Any, world: Any, data: Any, resources: Any, network: nn.Module) -> None:
        self.network = network
        order = OrderOfRank(config.run.seed, world.rank, world.size, config.update.accumulation)
        self.train_loader = CountingLoader(data.train, config.data, order, resources.device, 1)
        self.bad_held_out = self.train_loader.bad_samples

    def forward(self, batch: CountingBatch, step: int, number: int) -> Tensor:
        time.sleep(STEP_SECONDS)
        return self.network(batch.numbers)

    def loss(self, outputs: Tensor, batch: CountingBatch) -> CountingLoss:
        return CountingLoss(outputs.mean())

    def evaluate(self, model: nn.Module, beat: Any) -> dict[str, float]:
        beat(1)
        return {"sum": sum(weights.sum().item() for weights in model.parameters()), "images": 1}

    def close(self) -> None:
        pass


class CountingSamples(list[int]):
    classes, digest = ("one",), "0" * 12


class CountingData(TaskData):
    train, held_out = CountingSamples(range(SAMPLES)), CountingSamples([0])

    def describe(self, config: Any) -> str:
        return "numbers"


class CountingNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMBERS))

    def forward(self, numbers: Tensor) -> Tensor:
        return numbers @ self.weight


class CountingTask:
    scores = ("sum",)
    complete = staticmethod(lambda config: config)
    choose = staticmethod(lambda config, *_: config)
    read = staticmethod(lambda *_: CountingData())
    count = staticmethod(lambda _: None)
    begin = CountingLearner
    metadata = staticmethod(lambda _: {})
    summary = staticmethod(str)

    def build(self, config: Any, num_classes: int) -> Network:
        return Network(CountingNetwork(), ("head",), lambda images: images, lambda _: [])


class SocketCollectives(Collectives):
    """Horovod's collectives, by way of the launcher."""

    current: SocketCollectives | None = None

    def __init__(self) -> None:
        rank, size = (int(os.environ[f"HOROVOD_{name}"]) for name in ("RANK", "SIZE"))
        self.position = {"rank": rank, "size": size, "local_rank": 0, "local_size": 1, "controller": "gloo"}
        self._started, self._results = 0, []
        SocketCollectives.current = self
        try:
            self._hub = Client(("127.0.0.1", int(os.environ["HUB"])))
            self._hub.send_bytes(pickle.dumps((rank, size, os.environ["HOROVOD_HOSTNAME"], os.getpid())))
        except OSError:
            raise RankLostError("another rank has exited (no connection)") from None

    @classmethod
    def leave(cls) -> None:
        if cls.current is not None and hasattr(cls.current, "_hub"):
            cls.current._hub.close()
        cls.current = None

    def _start(self, value: Any) -> int:
        try:
            self._hub.send_bytes(pickle.dumps(value))
        except OSError:
            raise RankLostError("another rank has exited (connection closed)") from None
        self._started += 1
        return self._started

    def _wait(self, number: int) -> list[Any]:
        while len(self._results) < number:
            try:
                if not self._hub.poll(LONGEST_WAIT_SECONDS):
                    raise RankLostError("another rank does not answer (timed out)")
                self._results.append([pickle.loads(each) for each in pickle.loads(self._hub.recv_bytes())])
            except (OSError, EOFError):
                raise RankLostError("another rank has exited (connection closed)") from None
        return self._results[number - 1]

    def allgather_object(self, value: Any) -> list[Any]:
        return self._wait(self._start(value))

    def allreduce_async(self, tensor: Tensor, name: str, scale: float = 1.0) -> Any:
        number = self._start(tensor)
        return lambda: tensor.copy_(sum(self._wait(number)) * scale)

    def allgather_async(self, part: Tensor, name: str) -> Any:
        number = self._start(part)
        return lambda: torch.cat(self._wait(number))

    def broadcast_async(self, tensor: Tensor, name: str, root: int = 0) -> Any:
        number = self._start(tensor.detach())
        return lambda: tensor.detach().copy_(self._wait(number)[root])


def noting(folder: Path) -> None:
    """Have the package note the lock, what is written, and the state after each step."""

    class Notes(Callback):
        def started(self, run: TrainContext) -> None:
            self._set = run.world.broadcast_object(uuid.uuid4().hex)  # the name of this set of ranks
            self._note(run, "started")

        def step_agreed(self, run: TrainContext, outcome: Outcome) -> None:
            self._samples = list(outcome.own.samples)

        def step_done(self, run: TrainContext) -> None:
            self._note(run, "step", samples=self._samples)

        def _note(self, run: TrainContext, event: str, **facts: Any) -> None:
            position = {"set": self._set, "step": run.step, "rank": run.world.rank, "ranks": run.world.size}
            note(folder, event, **position, state=digest(run.state.full_state_dict()), **facts)

    register_callback(Notes)
    take, close = RunLock.__init__, RunLock.close

    def taking(self: RunLock, *arguments: Any) -> None:
        take(self, *arguments)
        note(folder, "lock")

    def closing(self: RunLock) -> None:
        close(self)
        note(folder, "unlock")

    def noted(write: Any, name: Any) -> Any:
        def writing(*arguments: Any) -> Any:
            began = time.monotonic()
            result = write(*arguments)  # it raises an error if this process must not
            note(folder, "write", time=began, file=name(*arguments))
            if name(*arguments) == "last":
                step, state = int(arguments[1].name.removeprefix("step_")), files.read_tensors(arguments[1])
                note(folder, "published", time=began, step=step, state=digest(state))
            return result

        return writing

    RunLock.__init__, RunLock.close = taking, closing
    AppendedFile.append = noted(AppendedFile.append, lambda file, _: file.path.name)
    files.update_link = noted(files.update_link, lambda link, *_: link.name)
    files.delete_old_checkpoints = noted(files.delete_old_checkpoints, lambda *_: "old checkpoints")


def inject(folder: Path) -> None:
    """Have files `slow`, `clock` and `cut.HOST` slow the disk down, move the clock and cut this host off."""
    fsync, now, request = os.fsync, time.time, ElasticJob._request

    def syncing(descriptor: int) -> None:
        time.sleep(0.05 * (folder / "slow").exists())
        fsync(descriptor)

    def shifted() -> float:
        return now() + (float((folder / "clock").read_text() or 0) if (folder / "clock").exists() else 0.0)

    def requesting(self: ElasticJob, *arguments: Any) -> tuple[int, bytes]:
        cut = folder / f"cut.{os.environ['HOROVOD_HOSTNAME']}"
        if cut.exists() and time.monotonic() < float(cut.read_text() or 0):
            raise TimeoutError("no route to host")
        return request(self, *arguments)

    os.fsync, time.time, ElasticJob._request = syncing, shifted, requesting


def hasten(host: str) -> None:
    """Count, shorten time limits, leave out what takes long to start, and give this host its name."""
    TASKS["classification"] = CountingTask()
    run_lock._STALE_SECONDS, run_lock._REFRESH_SECONDS, run_lock._POLL_SECONDS = STALE_SECONDS, 0.15, 0.05
    job._CONNECT_SECONDS, job._RETRIES = 1.0, 4
    entry.package_versions, entry.code_digest = dict, str
    run.collect_environment = dict
    watchdog.Watchdog = lambda *_, **__: watchdog.NoWatchdog()
    world.HorovodCollectives = SocketCollectives
    elastic_run.leave_ranks = SocketCollectives.leave
    job.listen_for_hosts = lambda to: signal.signal(signal.SIGUSR2, lambda *_: to.on_hosts_updated(0, None))
    this_process = run_lock._this_process
    run_lock._this_process = lambda: this_process() | {"host": host, "boot": host}


def become_rank(folder: Path, arguments: list[str]) -> None:
    """Train in this process, a fork of the launcher, and end it."""
    noting(folder)
    inject(folder)
    hasten(os.environ["MACHINE"])
    exit_at_once(main(arguments))


if "HISTORY" in os.environ:  # of ranks of horovodrun, which are given this module as a plugin
    noting(Path(os.environ["HISTORY"]))
