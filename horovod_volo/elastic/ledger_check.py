"""Checks the ledger of a run: in every epoch, each image of the order was taken exactly once.

Steps that were trained again, because the run went on from an earlier checkpoint, count as their last run:
of the earlier one nothing is left in the weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_volo.cluster.step_statistics import checksums
from horovod_volo.core.errors import UserError
from horovod_volo.data.sampler import balanced_order, draws_of_classes, epoch_order
from horovod_volo.elastic.ledger import CLASSES, LEDGER, LedgerStart, read_ledger


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
                self._span(**record)
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

    def _span(self, *, steps: list[int], epoch: int, samples: list[int], checksums: list[int]) -> None:
        start, (first, last) = self._start, steps
        if start is None:
            raise self._mistake("steps come before the first start")
        if first != self._step + 1 or last < first:
            raise self._mistake(f"steps {first} to {last} follow step {self._step}")
        in_epoch, expected_epoch = (first - 1) % start.steps_per_epoch, (first - 1) // start.steps_per_epoch
        end = in_epoch + last - first + 1
        batch = start.global_batch
        if epoch != expected_epoch or end > start.steps_per_epoch:
            raise self._mistake(f"steps {first} to {last} are not in epoch {epoch}")
        if samples != [in_epoch * batch, end * batch]:
            raise self._mistake(f"steps {first} to {last} took samples {samples[0]} to {samples[1]}")
        if self._sums_of(epoch)[in_epoch:end].sum(axis=0).tolist() != checksums:
            raise self._mistake(
                f"steps {first} to {last} did not take the images that the order has there: their checksums "
                "differ"
            )
        self._step = last

    def _sums_of(self, epoch: int) -> NDArray[np.int64]:
        """Return the sums over ranks of each step's checksums in an epoch, (steps, 2)."""
        if epoch == self._epoch:
            return self._sums
        assert self._start is not None
        start = self._start
        order = self._order(start, epoch)
        of_steps = order[: start.steps_per_epoch * start.global_batch].reshape(start.steps_per_epoch, -1)
        sums = np.zeros((start.steps_per_epoch, 2), dtype=np.int64)
        for rank in range(start.ranks):
            of_rank = checksums(start.seed, epoch, of_steps[:, rank :: start.ranks])
            sums += np.stack(of_rank, axis=1).astype(np.int64)
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
