"""The ledger proves that every image of an epoch was taken once, and shows what was not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from horovod_volo.cluster.collectives import Collectives, WaitForResult
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.step_statistics import CHECKSUM_BITS, OwnStep, checksums
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange
from horovod_volo.core.errors import UserError
from horovod_volo.data.sampler import epoch_order, rank_indices
from horovod_volo.elastic.ledger import LEDGER, Ledger, LedgerStart, check_ledger

START = LedgerStart(
    seed=7, images=50, block_shuffle=0, shuffle_window=64, global_batch=8, steps_per_epoch=6, ranks=2
)
Records = list[dict[str, Any]]


def take(ledger: Ledger, first: int, last: int, *, skip_rank: int = -1, epoch_shift: int = 0) -> None:
    """Let all ranks take steps `first` to `last`, as the loader and the exchange would."""
    start = ledger.start
    for step in range(first, last + 1):
        epoch, in_epoch = divmod(step - 1, start.steps_per_epoch)
        order = epoch_order(start.seed, epoch + epoch_shift, start.images)
        sums = np.zeros(2, dtype=np.int64)
        for rank in range(start.ranks):
            micro_batches = rank_indices(
                order, in_epoch, rank=rank, size=start.ranks, global_batch=start.global_batch, accumulation=1
            )
            if rank != skip_rank:
                sums += np.array(checksums(start.seed, epoch, np.concatenate(micro_batches)), dtype=np.int64)
        ledger.note(step, (int(sums[0]), int(sums[1])))


def begun(folder: Path, step: int, start: LedgerStart = START) -> Ledger:
    ledger = Ledger()
    ledger.begin(folder / LEDGER, start, step, ["host"] * start.ranks)
    return ledger


def written(folder: Path, first: int, last: int, start: LedgerStart = START, **mistake: int) -> Ledger:
    """Begin before step `first`, take all steps to `last`, and write them."""
    ledger = begun(folder, first - 1, start)
    take(ledger, first, last, **mistake)
    ledger.write()
    return ledger


def test_an_epoch_and_a_half(tmp_path: Path) -> None:
    written(tmp_path, 1, 3, replace(START, seed=8))  # an attempt that saved nothing
    ledger = written(tmp_path, 1, 4)
    take(ledger, 5, 9)  # across the end of the epoch
    ledger.write()
    text = check_ledger(tmp_path)
    assert "1 epochs are complete: each of 48 images was taken once" in text
    assert "the other 2 do not fill a step" in text
    assert "of the next epoch 24 images" in text


def test_other_ranks_and_repeated_steps(tmp_path: Path) -> None:
    written(tmp_path, 1, 5)
    written(tmp_path, 4, 12, replace(START, ranks=3))  # 8 images on 3 ranks: 3, 3, 2
    assert "2 epochs are complete" in check_ledger(tmp_path)
    assert "12 steps in 2 starts or re-formations; 2 steps were trained again" in check_ledger(tmp_path)


def test_a_new_rank_0_writes_what_the_lost_one_did_not(tmp_path: Path) -> None:
    lost, survivor = begun(tmp_path, 0), Ledger()
    survivor.start = START
    for ledger in (lost, survivor):
        take(ledger, 1, 2)
        ledger.write()
        take(ledger, 3, 4)
    survivor.write()  # both are at a log point; rank 0 is lost before it writes
    take(survivor, 5, 5)
    successor = Ledger(survivor.latest())
    successor.begin(tmp_path / LEDGER, replace(START, ranks=1), 5, ["host"])
    take(successor, 6, 6)
    successor.write()
    assert "1 epochs are complete" in check_ledger(tmp_path)


def test_a_line_that_was_written_in_part(tmp_path: Path) -> None:
    written(tmp_path, 1, 4)
    with (tmp_path / LEDGER).open("a") as file:
        file.write('{"steps": [5, 6], "epo')
    written(tmp_path, 5, 6)
    assert "1 epochs are complete" in check_ledger(tmp_path)


@pytest.mark.parametrize("mistake", [{"skip_rank": 1}, {"epoch_shift": 1}], ids=["image", "epoch"])
def test_an_image_taken_twice_or_of_another_epoch_shows(tmp_path: Path, mistake: dict[str, int]) -> None:
    written(tmp_path, 1, 3, **mistake)
    with pytest.raises(UserError, match="their checksums differ"):
        check_ledger(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda records: records.pop(2), "missing"),
        (lambda records: records.insert(2, records[1]), "steps 1 to 3, .* follow step 3"),
        (lambda records: records[3].update(step=7), "steps 6 to 7 are missing"),
        (lambda records: records[3].update(seed=8), "settings changed at step 5"),
        (lambda records: records[1].update(samples=[8, 32]), r"samples \[8, 32\]"),
        (lambda records: records[1].update(epoch=1), "of epoch 1"),
    ],
)
def test_mistakes(tmp_path: Path, change: Callable[[Records], object], message: str) -> None:
    ledger = written(tmp_path, 1, 3)
    take(ledger, 4, 5)
    ledger.write()
    take(begun(tmp_path, 5), 6, 6)
    path = tmp_path / LEDGER
    assert check_ledger(tmp_path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    with pytest.raises(UserError, match=message):
        check_ledger(tmp_path)


@pytest.mark.parametrize("content", [None, "", "[]\n", '{"steps": 3}\n', '{"step": "a", "hosts": []}\n'])
def test_a_missing_or_damaged_ledger(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / LEDGER).write_text(content)
    with pytest.raises(UserError, match=r"proves nothing|does not prove|cannot be read"):
        check_ledger(tmp_path)


class ManyRanks(Collectives):
    """Sums in fp32 what ranks send, each of which sends one of a few messages."""

    def __init__(self, messages: list[Tensor], ranks: Tensor) -> None:
        self.messages, self.ranks = messages, ranks

    def allreduce_async(self, tensor: Tensor, name: str, scale: float = 1.0) -> WaitForResult:
        self.messages.append(tensor.clone())
        tensor.copy_(torch.stack(self.messages)[self.ranks % len(self.messages)].sum(0) * scale)
        return lambda: tensor


@pytest.mark.parametrize("size", [3, 1000, 10_000, 40_000, 65_536])
def test_the_sums_of_checksums_are_exact_with_many_ranks(size: int) -> None:
    world = World(size=size, collectives=ManyRanks([], torch.arange(size)))
    most = (1 << CHECKSUM_BITS) - 1
    sent = [(most, 1), (most - 1, 2), (most, 2049)]
    for checksums_of_rank in sent:
        reducer = Reducer(torch.nn.Linear(1, 1), world, Exchange(compression="none"), micro_batches=1)
        statistics = reducer.statistics
        statistics.note_step(OwnStep(1, (), checksums_of_rank))
        statistics.average_async()()
    of_ranks = np.array(sent)[np.arange(size) % len(sent)]
    (outcome,) = statistics.outcomes(of_all=False)
    assert outcome.checksums == tuple(of_ranks.sum(axis=0).tolist())
