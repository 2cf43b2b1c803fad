"""The ledger of a run: which images of an epoch's order each step has taken, written to ledger.jsonl.

The loader passes on with each batch which images it was to read. Their checksums are added over ranks in the
exchange of every step, so a step is in the ledger if, and only if, all ranks have taken it. Every rank notes
the steps; rank 0 writes them at log points and before checkpoints. The doctor compares the file with the
orders, which follow from the seed: in every epoch, each image of the order was taken exactly once. Steps that
were trained again, because the run went on from an earlier checkpoint, count as their last run: of the
earlier one nothing is left in the weights.
"""

import contextlib
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_volo.cluster.step_statistics import Outcome, checksums
from horovod_volo.core.atomic_file import MayWrite, atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.sampler import epoch_order
from horovod_volo.engine.callbacks import STANDARD, Callback
from horovod_volo.engine.context import TrainContext
from horovod_volo.monitor.logger import AppendedFile, parsed_line

LEDGER = "ledger.jsonl"
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
    micro_batch: int = 0  # with --reproducible
    balance: float = 0.0  # --balance, or --aug-repeats: above 0 images are drawn several times by plan

    def span(self, epoch: int, first: int, last: int) -> dict[str, Any]:
        """Return the record of consecutive steps of an epoch, without their checksums."""
        position = (first - 1 - epoch * self.steps_per_epoch) * self.global_batch
        end = position + (last - first + 1) * self.global_batch
        return {"steps": [first, last], "epoch": epoch, "samples": [position, end]}


class LedgerStep(NamedTuple):
    """A step that all ranks have taken, counted from 1, and the sums over ranks of its checksums."""

    step: int
    checksums: tuple[int, int]


class Ledger(Callback):
    """Notes the steps of a run, on every rank; rank 0 writes them."""

    start: LedgerStart | None = None  # before the run has begun, nothing is noted

    def __init__(self, earlier: Sequence[LedgerStep] = ()) -> None:
        """`earlier` are the latest steps of a set of ranks before, whose rank 0 may not have written them."""
        self._earlier = earlier
        self._may_write: MayWrite = lambda: None
        self._file: AppendedFile | None = None  # None on ranks that do not write
        self._unwritten: list[LedgerStep] = []
        self._written: deque[list[LedgerStep]] = deque(maxlen=_WRITES_KEPT)

    def started(self, run: TrainContext) -> None:
        data = run.config.data
        self.start = LedgerStart(
            seed=run.config.run.seed,
            images=len(run.data.train),
            block_shuffle=data.block_shuffle,
            shuffle_window=data.shuffle_window,
            global_batch=run.derived.global_batch,
            steps_per_epoch=run.derived.steps_per_epoch,
            ranks=run.world.size,
            micro_batch=run.derived.micro_batch,
            # Other tasks do not read them.
            balance=(data.balance or data.aug_repeats) if run.config.model.task == "classification" else 0.0,
        )
        self._may_write = run.may_write
        if run.world.is_rank_zero:
            self.begin(run.folder / LEDGER, self.start, run.step, run.hosts)

    def step_agreed(self, run: TrainContext, outcome: Outcome) -> None:  # noqa: ARG002
        if self.start is not None:
            self.note(outcome.own.step, outcome.checksums)

    def flush(self, run: TrainContext) -> None:  # noqa: ARG002
        # Another process has the run folder: the logger says so.
        with contextlib.suppress(UserError):
            self.write()

    def went_back(self, run: TrainContext) -> None:
        if self._file is not None and self.start is not None:
            self.begin(self._file.path, self.start, run.step, run.hosts)

    def begin(self, path: Path, start: LedgerStart, step: int, hosts: Sequence[str]) -> None:
        """Write which step the run has reached, and the earlier steps that the file lacks up to there."""
        self.start, self._file = start, self._file or AppendedFile(path, may_write=self._may_write)
        if path.exists() and not self._file.lacks:
            _drop_damaged_end(path, self._may_write)
        records = read_ledger(path) if path.exists() else []
        last: dict[str, Any] = records[-1] if records else {"step": 0}
        recorded = last["steps"][1] if "steps" in last else last["step"]
        self._unwritten = [each for each in self._earlier if recorded < each.step <= step]
        self._earlier = ()
        self.write()
        self._append(json.dumps({"step": step, "hosts": list(hosts), **asdict(start)}) + "\n")

    def note(self, step: int, sums: tuple[int, int]) -> None:
        """Note a step that all ranks have taken, with the sums over ranks of its checksums."""
        self._unwritten.append(LedgerStep(step, sums))

    def write(self) -> None:
        """Write what was noted since the last call."""
        if (start := self.start) is None:
            return
        steps, self._unwritten = self._unwritten, []
        for epoch, in_epoch in groupby(steps, lambda each: (each.step - 1) // start.steps_per_epoch):
            part = list(in_epoch)
            sums = [sum(each) for each in zip(*(step.checksums for step in part), strict=True)]
            record = start.span(epoch, part[0].step, part[-1].step) | {"checksums": sums}
            self._append(f"{json.dumps(record)}\n")
        self._written.append(steps)

    def latest(self) -> list[LedgerStep]:
        """Return the latest steps, of which rank 0 may not have written some before it was lost."""
        return [each for steps in self._written for each in steps] + self._unwritten

    def _append(self, text: str) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # it is kept; the logger says that the disk is full
                self._file.append(text.encode())


def _drop_damaged_end(path: Path, may_write: MayWrite) -> None:
    """Drop what follows the first damaged line since the last start: a power cut may leave gaps there."""
    lines = path.read_bytes().splitlines(keepends=True)
    start = max((number for number, line in enumerate(lines) if b'"hosts"' in line), default=0)
    intact = takewhile(lambda line: line.endswith(b"\n") and parsed_line(line), lines[start:])
    with atomic_write(path, may_write) as file:  # a new file, as AppendedFile.renew has it
        file.writelines(chain(lines[:start], intact))


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ledger, without those that a killed process wrote in part."""
    return [record for line in path.read_bytes().split(b"\n") if (record := parsed_line(line))]


def check_ledger(run: Path) -> str:
    """Return what the ledger of a run folder proves; raise UserError if it proves a mistake, or nothing."""
    path = run / LEDGER
    try:
        proof = _LedgerCheck()
        for record in read_ledger(path):
            if "steps" in record:
                proof.add_steps(**record)
            else:
                proof.add_start(**record)
        return f"{path}: {proof.conclusion()}"
    except _MistakeError as mistake:
        raise UserError(f"{path} does not prove that each image was taken once: {mistake}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Give the folder of a run.") from None
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): it proves nothing.") from None


class _MistakeError(Exception):
    """What is wrong with the steps of a ledger."""


class _LedgerCheck:
    """Follows a ledger from its first line to its last."""

    def __init__(self) -> None:
        self._start: LedgerStart | None = None
        self._starts = self._step = self._repeated = 0
        self._epoch, self._sums = -1, np.zeros((0, 2), dtype=np.int64)

    def add_start(self, *, step: int, hosts: list[str], **settings: Any) -> None:
        del hosts
        start = LedgerStart(**settings)
        if start.balance:
            raise _MistakeError("with --balance or --aug-repeats, images are drawn several times by plan")
        # At step 0 a run begins, whatever was tried before.
        if step and self._start is not None and replace(start, ranks=self._start.ranks) != self._start:
            raise _MistakeError(f"the settings changed at step {step}, so the orders do not continue")
        if step > self._step:
            raise _MistakeError(f"steps {self._step + 1} to {step} are missing")
        self._starts += 1
        self._repeated += self._step - step
        self._start, self._step, self._epoch = start, step, -1

    def add_steps(self, *, steps: list[int], checksums: list[int], **span: Any) -> None:
        start, (first, last) = self._start, steps
        if start is None:
            raise _MistakeError("steps come before the first start")
        epoch, in_epoch = divmod(self._step, start.steps_per_epoch)
        end = in_epoch + last - self._step
        is_next = {"steps": steps, **span} == start.span(epoch, self._step + 1, last)
        if not is_next or not in_epoch < end <= start.steps_per_epoch:
            taken = f"samples {span['samples']} of epoch {span['epoch']}"
            raise _MistakeError(f"steps {first} to {last}, {taken}, follow step {self._step}")
        if epoch != self._epoch:
            self._epoch, self._sums = epoch, self._sums_of(start, epoch)
        if self._sums[in_epoch:end].sum(axis=0).tolist() != checksums:
            raise _MistakeError(
                f"steps {first} to {last} did not take the images that the order has there: their checksums "
                "differ"
            )
        self._step = last

    def conclusion(self) -> str:
        if (start := self._start) is None:
            raise _MistakeError("it has no lines")
        epochs, over = divmod(self._step, start.steps_per_epoch)
        in_epoch = start.steps_per_epoch * start.global_batch
        left = start.images - in_epoch
        text = f"{epochs} epochs are complete: each of {in_epoch:,} images was taken once in each of them"
        if left:
            text += f" (the other {left:,} do not fill a step, and differ from epoch to epoch)"
        if over:
            text += f"; of the next epoch {over * start.global_batch:,} images, each once"
        again = f"; {self._repeated} steps were trained again after a restart" if self._repeated else ""
        return f"{text}. {self._step} steps in {self._starts} starts or re-formations{again}."

    def _sums_of(self, start: LedgerStart, epoch: int) -> NDArray[np.int64]:
        """Return the sums over ranks of each step's checksums in an epoch, (steps, 2)."""
        block, window = start.block_shuffle, start.shuffle_window
        order = epoch_order(start.seed, epoch, start.images, block=block, window=window)
        # Ranks take images in turn, or micro-batches.
        parts = order[: start.steps_per_epoch * start.global_batch]
        by_step = parts.reshape(start.steps_per_epoch, -1, start.micro_batch or 1)
        sums = np.zeros((start.steps_per_epoch, 2), dtype=np.int64)
        for rank in range(start.ranks):
            of_rank = by_step[:, rank :: start.ranks].reshape(start.steps_per_epoch, -1)
            sums += np.stack(checksums(start.seed, epoch, of_rank), axis=1).astype(np.int64)
        return sums


STANDARD.register("ledger", Ledger)
