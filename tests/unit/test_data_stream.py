"""A training stream is a pure function of where it starts, fails with the file's name and ends clean."""

import gc
import os
import threading
from time import perf_counter

import numpy as np
import pytest
import torch
from coded_images import smooth, write_images

from horovod_volo.bench.memory import resident_bytes
from horovod_volo.config.schema import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.labels.source import open_labels
from horovod_volo.data.loader import TrainLoader

IMAGES = 20


@pytest.fixture
def folder(tmp_path):
    images = {f"train/{'ab'[n % 2]}/{n:02d}.jpg": smooth(60 + n, 90 - 2 * n, seed=n) for n in range(IMAGES)}
    return write_images(tmp_path / "images", images)


@pytest.fixture
def open_stream(folder):
    """Return a function that opens streams on the folder; all are closed at the end."""
    opened = []

    def opening(*, maps=None, rank=0, size=1, accumulation=1, **settings):
        catalog = build_catalog(str(folder), "train", None)
        stream = TrainLoader(
            catalog,
            None if maps is None else open_labels(str(maps), catalog, None),
            Data(**{"batch_size": 3, **settings}),
            image_size=32,
            seed=5,
            rank=rank,
            size=size,
            accumulation=accumulation,
            device=torch.device("cpu"),
            threads=2,
        )
        opened.append(stream)
        return stream

    yield opening
    for stream in opened:
        stream.close()


def assert_same(batches, others):
    assert len(batches) == len(others)
    for a, b in zip(batches, others, strict=True):
        assert (a.indices == b.indices).all()
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels.classes, b.labels.classes)


def test_batches_carry_images_with_their_classes(open_stream, folder):
    stream = open_stream()
    assert stream.steps == 6
    batches = list(stream.batches(0, 0))
    assert len(batches) == 6
    targets = build_catalog(str(folder), "train", None).targets
    for batch in batches:
        assert batch.images.shape == (3, 3, 32, 32)
        assert batch.images.dtype == torch.float32
        assert batch.labels.classes.dtype == torch.int64
        assert batch.labels.classes.tolist() == targets[batch.indices].tolist()
    seen = np.concatenate([batch.indices for batch in batches])
    assert len(set(seen)) == 18


def test_ranks_share_a_step_without_changing_it(open_stream):
    """One global batch of 6, shared in five ways: the same images, cut alike, pixel for pixel."""
    ledgers = []
    for size, batch_size, accumulation in ((1, 6, 1), (2, 3, 1), (3, 2, 1), (1, 3, 2), (3, 1, 2)):
        steps = [set() for _ in range(3)]
        for rank in range(size):
            stream = open_stream(rank=rank, size=size, accumulation=accumulation, batch_size=batch_size)
            for number, batch in enumerate(stream.batches(2, 0)):
                for index, image in zip(batch.indices, batch.images, strict=True):
                    steps[number // accumulation].add((int(index), image.numpy().tobytes()))
        assert [len(step) for step in steps] == [6, 6, 6]
        ledgers.append(steps)
    assert all(ledger == ledgers[0] for ledger in ledgers)


@pytest.mark.parametrize("first_step", [1, 2, 3])
def test_an_epoch_resumed_is_the_rest_of_it(open_stream, first_step):
    whole = list(open_stream(accumulation=2, vflip=0.5).batches(3, 0))
    rest = list(open_stream(accumulation=2, vflip=0.5).batches(3, first_step))
    assert len(rest) == 6 - 2 * first_step
    assert_same(rest, whole[2 * first_step :])


def test_an_epoch_left_midway_leaves_nothing_behind(open_stream):
    stream = open_stream()
    wanted = {epoch: list(stream.batches(epoch, 0)) for epoch in range(3)}
    for taken in (0, 1, 5, 6):
        abandoned = stream.batches(0, 0)
        for _ in range(taken):
            next(abandoned)
        assert_same(list(stream.batches(1, 0)), wanted[1])
    for batch in stream.batches(0, 0):
        assert (batch.indices == wanted[0][0].indices).all()
        break
    assert_same(list(stream.batches(2, 2)), wanted[2][2:])


def test_an_epoch_that_another_ended_refuses_to_go_on(open_stream):
    stream = open_stream()
    older, newer = stream.batches(0, 0), stream.batches(1, 0)
    next(older)
    first = next(newer)
    with pytest.raises(RuntimeError, match="a later one began"):
        next(older)
    rest = list(newer)
    assert_same([first, *rest], list(stream.batches(1, 0)))


def test_batches_stay_as_they_were(open_stream):
    stream = open_stream()
    kept, copies = [], []
    for batch in stream.batches(0, 0):
        kept.append(batch.images)
        copies.append(batch.images.clone())
    list(stream.batches(1, 0))
    stream.close()
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))


def test_labels_stay_with_their_images(open_stream, folder, tmp_path):
    """Each map holds its image's number; the classes of a batch and its maps must name the same images."""
    catalog = build_catalog(str(folder), "train", None)
    for index in range(len(catalog)):
        file = (tmp_path / "maps" / catalog.name(index)).with_suffix(".pt")
        file.parent.mkdir(parents=True, exist_ok=True)
        scores = torch.full((1, 1, 2, 2), float(index))
        torch.save(torch.cat([scores, torch.zeros_like(scores)]).half(), file)
    stream = open_stream(maps=tmp_path / "maps", aa="")
    plain = open_stream(aa="")
    for epoch in range(2):
        for batch, unlabelled in zip(stream.batches(epoch, 0), plain.batches(epoch, 0), strict=True):
            assert batch.labels.maps.ids.shape == (3, 1, 2, 2)
            assert (batch.labels.maps.scores[:, 0, 0, 0].numpy() == batch.indices).all()
            assert batch.labels.maps.boxes.dtype == torch.float32
            assert torch.equal(batch.images, unlabelled.images)


def spoilt(file, how):
    whole = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes({"empty": b"", "garbage": b"no image", "cut short": whole[: len(whole) // 2]}[how])
    return whole


@pytest.mark.parametrize("how", ["gone", "empty", "garbage", "cut short"])
def test_a_spoilt_image_is_named_and_once_mended_training_goes_on(open_stream, folder, how):
    stream = open_stream(batch_size=5, bad_samples="fail")
    wanted = list(stream.batches(1, 0))
    file = folder / "train" / "a" / "08.jpg"
    whole = spoilt(file, how)
    with pytest.raises(UserError, match=r"a/08\.jpg.*--bad-samples skip"):
        list(stream.batches(0, 0))
    file.write_bytes(whole)
    assert_same(list(stream.batches(1, 0)), wanted)


def test_an_abandoned_epoch_may_hold_a_spoilt_image(open_stream, folder):
    stream = open_stream(batch_size=5, bad_samples="skip")
    wanted = {epoch: list(stream.batches(epoch, 0)) for epoch in range(2)}
    catalog = build_catalog(str(folder), "train", None)
    in_second_batch = folder / "train" / catalog.name(int(wanted[0][1].indices[2]))
    whole = spoilt(in_second_batch, "cut short")
    abandoned = stream.batches(0, 0)
    assert_same([next(abandoned)], wanted[0][:1])
    in_second_batch.write_bytes(whole)
    assert_same(list(stream.batches(1, 0)), wanted[1])


def test_waiting_is_measured(open_stream):
    stream = open_stream()
    batches = stream.batches(0, 0)
    outside = 0.0
    for _ in range(6):
        began = perf_counter()
        next(batches)
        outside += perf_counter() - began
    assert 0.9 * outside - 0.01 < stream.waited_seconds <= outside


def threads_of_process():
    gc.collect()
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208  # native threads too


def test_closing_ends_every_thread(open_stream):
    before = {thread.ident for thread in threading.enumerate()}
    native_before = threads_of_process()
    streams = [open_stream(), open_stream(), open_stream()]
    list(streams[0].batches(0, 0))
    next(streams[1].batches(0, 0))
    left_open = streams[2].batches(0, 0)
    next(left_open)
    assert threads_of_process() > native_before
    for stream in streams:
        stream.close()
        stream.close()  # once more does no harm
    assert {thread.ident for thread in threading.enumerate()} <= before
    assert threads_of_process() <= native_before
    with pytest.raises(RuntimeError, match="the loader was closed"):
        next(left_open)


def test_many_epochs_need_no_more_threads(open_stream):
    stream = open_stream()
    list(stream.batches(0, 0))
    after_one = threads_of_process()
    for epoch in range(10):
        for _ in stream.batches(epoch, 4):
            break
    assert threads_of_process() <= after_one


def test_fifty_starts_and_stops_leave_nothing(folder):
    """Each stream reads an epoch, every other one a part; the first ten fill what is kept for good."""
    held = []
    for start in range(50):
        catalog = build_catalog(str(folder), "train", None)
        stream = TrainLoader(
            catalog,
            None,
            Data(batch_size=3),
            image_size=32,
            seed=5,
            rank=0,
            size=1,
            accumulation=1,
            device=torch.device("cpu"),
            threads=2,
        )
        for number, _ in enumerate(stream.batches(start, 0)):
            if start % 2 and number == 2:
                break
        stream.close()
        del catalog, stream
        gc.collect()
        open_files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        held.append((threads_of_process(), open_files, resident_bytes()))
    threads, files, memory = zip(*held[9:], strict=True)
    assert max(threads) <= threads[0]
    assert max(files) <= files[0]
    assert memory[-1] - memory[0] < 16 * 2**20
