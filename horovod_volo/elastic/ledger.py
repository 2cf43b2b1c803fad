"""The ledger of a run: which images of an epoch's order each step has taken, written to ledger.jsonl.

The loader passes on with each batch which images it was to read. Their checksums are added over ranks in the
exchange of every step, so a step is in the ledger if, and only if, all ranks have taken it. Every rank notes
the steps; rank 0 writes them at log points and before checkpoints. The doctor compares the file with the
orders, which follow from the seed.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.cluster.step_statistics import Outcome
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.engine.callbacks import STANDARD, Callback
from horovod_volo.engine.context import TrainContext
from horovod_volo.monitor.logger import AppendedFile

LEDGER = "ledger.jsonl"
CLASSES = "ledger_classes.npy"
_WRITES_KEPT = 2


@dataclass(frozen=True)
class LedgerStart:
    """The first line of each start of a run: what the order and its parts follow from."""

    seed: int
    images: int
    block_shuffle: int
    shuffle_window: int
    global_batch: int
    steps_per_epoch: int
    ranks: int
    balance: float = 0.0  # above 0 the order also follows from the classes of the images, in CLASSES


class LedgerStep(NamedTuple):
    """A step that all ranks have taken, counted from 1, and its checksums."""

    step: int
    checksums: tuple[int, int]


class Ledger:
    """Notes the steps of a run, on every rank; rank 0 writes them."""

    def __init__(self, path: Path | None, start: LedgerStart) -> None:
        """`path` is the file, or None on ranks that do not write."""
        self.start = start
        self.may_write: Callable[[], object] = lambda: None  # as that of the run's logger
        self._file = None if path is None else AppendedFile(path)
        self._unwritten: list[LedgerStep] = []
        self._written: deque[list[LedgerStep]] = deque(maxlen=_WRITES_KEPT)

    def begin(self, step: int, hosts: Sequence[str], earlier: Sequence[LedgerStep] = ()) -> None:
        """Write which step the run has reached, and the `earlier` steps that the file lacks up to there."""
        if self._file is None:
            return
        recorded = _last_step(self._file.path)
        self._unwritten = [each for each in earlier if recorded < each.step <= step]
        if not _ends_with_line(self._file.path):
            self._append_text("\n")
        self.write()
        self._append({"step": step, "hosts": list(hosts), **asdict(self.start)})

    def note(self, step: int, sums: tuple[int, int]) -> None:
        """Note a step that all ranks have taken, with the sums over ranks of its checksums."""
        self._unwritten.append(LedgerStep(step, sums))

    def write(self) -> None:
        """Write what was noted since the last call."""
        steps, self._unwritten = self._unwritten, []
        for epoch, of_epoch in groupby(steps, lambda each: (each.step - 1) // self.start.steps_per_epoch):
            self._append_span(epoch, list(of_epoch))
        self._written.append(steps)

    def latest(self) -> list[LedgerStep]:
        """Return the latest steps, of which rank 0 may not have written some before it was lost."""
        return [each for steps in self._written for each in steps] + self._unwritten

    def _append_span(self, epoch: int, steps: list[LedgerStep]) -> None:
        first, batch = steps[0].step, self.start.global_batch
        position = (first - 1) % self.start.steps_per_epoch * batch
        sums = [sum(each) for each in zip(*(step.checksums for step in steps), strict=True)]
        self._append(
            {
                "steps": [first, steps[-1].step],
                "epoch": epoch,
                "samples": [position, position + len(steps) * batch],
                "checksums": sums,
            }
        )

    def _append(self, record: dict[str, Any]) -> None:
        self._append_text(f"{json.dumps(record)}\n")

    def _append_text(self, text: str) -> None:
        if self._file is not None:
            self.may_write()
            with contextlib.suppress(OSError):  # it is kept; the logger says that the disk is full
                self._file.append(text.encode())


class LedgerCallback(Callback):
    """Keeps the ledger of a run."""

    def __init__(self, earlier: Sequence[LedgerStep] = ()) -> None:
        """`earlier` are the latest steps of a set of ranks before, whose rank 0 may not have written them."""
        self._earlier = earlier
        self.ledger: Ledger | None = None

    def started(self, run: TrainContext) -> None:
        classes = run.learner.classes
        start = LedgerStart(
            seed=run.config.run.seed,
            images=len(run.data.train),
            block_shuffle=run.config.data.block_shuffle,
            shuffle_window=run.config.data.shuffle_window,
            global_batch=run.derived.global_batch,
            steps_per_epoch=run.derived.steps_per_epoch,
            ranks=run.world.size,
            balance=0.0 if classes is None else run.config.data.balance,
        )
        if classes is not None and run.world.is_rank_zero:
            write_classes(run.folder, classes)
        self.ledger = Ledger(run.folder / LEDGER if run.world.is_rank_zero else None, start)
        if run.lock is not None:
            self.ledger.may_write = run.lock.check
        self.ledger.begin(run.step, run.hosts, self._earlier)

    def step_agreed(self, run: TrainContext, outcome: Outcome) -> None:  # noqa: ARG002
        if self.ledger is not None:
            self.ledger.note(outcome.own.step, outcome.checksums)

    def flush(self, run: TrainContext) -> None:  # noqa: ARG002
        if self.ledger is not None:
            # Another process has the run folder: the logger says so.
            with contextlib.suppress(UserError):
                self.ledger.write()

    def latest(self) -> list[LedgerStep]:
        """Return the latest steps, of which rank 0 may not have written some before it was lost."""
        return [] if self.ledger is None else self.ledger.latest()

    def went_back(self, run: TrainContext) -> None:
        if self.ledger is not None:
            self.ledger.begin(run.step, run.hosts)


def write_classes(folder: Path, classes: NDArray[np.int32]) -> None:
    """Write the class of each training image beside the ledger; a full disk is no error here."""
    with contextlib.suppress(OSError), atomic_write(folder / CLASSES) as file:
        np.save(file, classes)


def _ends_with_line(path: Path) -> bool:
    """Return whether the file is complete: a process that is killed may write a line in part."""
    return not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")


def _last_step(path: Path) -> int:
    """Return the step that a ledger has reached; 0 without one."""
    last = 0
    for record in read_ledger(path) if path.exists() else []:
        last = record["steps"][1] if "steps" in record else record["step"]
    return last


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ledger, without those that a killed process wrote in part."""
    records = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


STANDARD.register("ledger", LedgerCallback)
