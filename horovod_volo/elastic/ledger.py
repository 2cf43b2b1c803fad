"""The ledger of a run: which images of an epoch's order each step has taken, written to ledger.jsonl.

The loader passes on with each batch which images it was to read. Their checksums are added over ranks in the
exchange of every step, so a step is in the ledger if, and only if, all ranks have taken it. Every rank notes
the steps; rank 0 writes them at log points and before checkpoints. The doctor compares the file with the
orders, which follow from the seed: in every epoch, each image of the order was taken exactly once. Steps that
were trained again, because the run went on from an earlier checkpoint, count as their last run: of the
earlier one nothing is left in the weights.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.cluster.step_statistics import Outcome, checksums
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.sampler import balanced_order, draws_of_classes, epoch_order
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
        path = self._file.path
        records = read_ledger(path) if path.exists() else []
        last: dict[str, Any] = records[-1] if records else {"step": 0}
        recorded = last["steps"][1] if "steps" in last else last["step"]
        self._unwritten = [each for each in earlier if recorded < each.step <= step]
        if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
            self._append_text("\n")  # a process that was killed wrote a line in part
        self.write()
        self._append({"step": step, "hosts": list(hosts), **asdict(self.start)})

    def note(self, step: int, sums: tuple[int, int]) -> None:
        """Note a step that all ranks have taken, with the sums over ranks of its checksums."""
        self._unwritten.append(LedgerStep(step, sums))

    def write(self) -> None:
        """Write what was noted since the last call."""
        steps, self._unwritten = self._unwritten, []
        for epoch, in_epoch in groupby(steps, lambda each: (each.step - 1) // self.start.steps_per_epoch):
            part = list(in_epoch)
            sums = [sum(each) for each in zip(*(step.checksums for step in part), strict=True)]
            self._append(_span(self.start, epoch, part[0].step, part[-1].step) | {"checksums": sums})
        self._written.append(steps)

    def latest(self) -> list[LedgerStep]:
        """Return the latest steps, of which rank 0 may not have written some before it was lost."""
        return [each for steps in self._written for each in steps] + self._unwritten

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


def _span(start: LedgerStart, epoch: int, first: int, last: int) -> dict[str, Any]:
    """Return the record of consecutive steps of an epoch, without their checksums."""
    position = (first - 1 - epoch * start.steps_per_epoch) * start.global_batch
    end = position + (last - first + 1) * start.global_batch
    return {"steps": [first, last], "epoch": epoch, "samples": [position, end]}


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ledger, without those that a killed process wrote in part."""
    records = []
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def check_ledger(run: Path) -> str:
    """Return what the ledger of a run folder proves; raise UserError if it proves a mistake, or nothing."""
    path = run / LEDGER
    try:
        records = read_ledger(path)
        return _LedgerCheck(path).check(records)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Give the folder of a run.") from None
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): it proves nothing.") from None


class _LedgerCheck:
    """Goes through a ledger from its first line to its last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start: LedgerStart | None = None
        self._starts = self._step = self._repeated = 0
        self._classes: NDArray[np.int32] | None = None
        self._epoch, self._sums = -1, np.zeros((0, 2), dtype=np.int64)

    def check(self, records: list[dict[str, Any]]) -> str:
        for record in records:
            if "steps" in record:
                self._check_steps(record)
            else:
                self._begin(**record)
        if self._start is None:
            raise self._mistake("it has no lines")
        start, epochs, over = self._start, *divmod(self._step, self._start.steps_per_epoch)
        in_epoch = start.steps_per_epoch * start.global_batch
        left = start.images - in_epoch
        what = "draws" if start.balance else "images"
        text = f"{epochs} epochs are complete: each of {in_epoch:,} {what} was taken once in each of them"
        if left:
            text += f" (the other {left:,} do not fill a step, and differ from epoch to epoch)"
        if over:
            text += f"; of the next epoch {over * start.global_batch:,} {what}, each once"
        text += self._repetitions(start)
        again = f"; {self._repeated} steps were trained again after a restart" if self._repeated else ""
        return f"{self._path}: {text}. {self._step} steps in {self._starts} starts or re-formations{again}."

    def _begin(self, *, step: int, hosts: list[str], **settings: Any) -> None:
        del hosts
        start = LedgerStart(**settings)
        if self._start is not None and replace(start, ranks=self._start.ranks) != self._start:
            raise self._mistake(f"the settings changed at step {step}, so the orders do not continue")
        if step > self._step:
            raise self._mistake(f"steps {self._step + 1} to {step} are missing")
        self._starts += 1
        self._repeated += self._step - step
        self._start, self._step, self._epoch = start, step, -1

    def _check_steps(self, record: dict[str, Any]) -> None:
        start, (first, last) = self._start, record["steps"]
        if start is None:
            raise self._mistake("steps come before the first start")
        if first != self._step + 1 or last < first:
            raise self._mistake(f"steps {first} to {last} follow step {self._step}")
        epoch, in_epoch = divmod(first - 1, start.steps_per_epoch)
        end = in_epoch + last - first + 1
        found = {key: record[key] for key in ("steps", "epoch", "samples")}
        if found != _span(start, epoch, first, last) or end > start.steps_per_epoch:
            raise self._mistake(
                f"steps {first} to {last} took samples {found['samples']} of epoch {found['epoch']}"
            )
        if self._sums_of(start, epoch)[in_epoch:end].sum(axis=0).tolist() != record["checksums"]:
            raise self._mistake(
                f"steps {first} to {last} did not take the images that the order has there: their checksums "
                "differ"
            )
        self._step = last

    def _sums_of(self, start: LedgerStart, epoch: int) -> NDArray[np.int64]:
        """Return the sums over ranks of each step's checksums in an epoch, (steps, 2)."""
        if epoch == self._epoch:
            return self._sums
        in_epoch = start.steps_per_epoch * start.global_batch
        by_step = self._order(start, epoch)[:in_epoch].reshape(start.steps_per_epoch, -1)
        sums = np.zeros((start.steps_per_epoch, 2), dtype=np.int64)
        for rank in range(start.ranks):
            own = checksums(start.seed, epoch, by_step[:, rank :: start.ranks])
            sums += np.stack(own, axis=1).astype(np.int64)
        self._epoch, self._sums = epoch, sums
        return sums

    def _order(self, start: LedgerStart, epoch: int) -> NDArray[Any]:
        if not start.balance:
            block, window = start.block_shuffle, start.shuffle_window
            return epoch_order(start.seed, epoch, start.images, block=block, window=window)
        if self._classes is None:
            self._classes = np.load(self._path.with_name(CLASSES))
        if len(self._classes) != start.images:
            raise self._mistake(f"{CLASSES} beside it is of {len(self._classes)} images, not {start.images}")
        return balanced_order(start.seed, epoch, self._classes, start.balance)

    def _repetitions(self, start: LedgerStart) -> str:
        """Say how often an epoch with --balance has the same image."""
        if self._classes is None:
            return ""
        counts = np.bincount(self._classes)
        draws = draws_of_classes(counts, start.balance) / np.maximum(counts, 1)
        most, least = int(np.ceil(draws.max())), int(np.floor(draws[counts > 0].min()))
        return (
            f". With --balance {start.balance:g} images are repeated by plan: an epoch draws each of the "
            f"{start.images:,} images {least} to {most} times"
        )

    def _mistake(self, what: str) -> UserError:
        return UserError(f"{self._path} does not prove that each image was taken once: {what}.")


STANDARD.register("ledger", LedgerCallback)
