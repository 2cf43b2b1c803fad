"""TrainLoader's batches are a function of epoch and step; which threads work, and that close() ends them."""

import gc
import threading
import time
from contextlib import closing
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
import torch
from coded_images import smooth, train_loader, write_images

from horovod_volo.config.data_settings import Data
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.prefetcher import ImageThreadPool
from horovod_volo.monitor.meters import host_memory_gib
from horovod_volo.token_labels.source import open_labels

IMAGES = 20


@pytest.fixture
def folder(tmp_path):
    images = {f"train/{'ab'[n % 2]}/{n:02d}.jpg": smooth(60 + n, 90 - 2 * n, seed=n) for n in range(IMAGES)}
    return write_images(tmp_path / "images", images)


@pytest.fixture
def open_loader(folder):
    """Return a function that opens loaders on the folder; all are closed at the end."""
    opened = []

    def opening(*, maps=None, rank=0, size=1, accumulation=1, **settings):
        catalog = build_catalog(str(folder), "train", None)
        labels = None if maps is None else open_labels(str(maps), catalog, None)
        ranks = {"rank": rank, "size": size, "accumulation": accumulation}
        loader = train_loader(catalog, Data(**{"batch_size": 3, **settings}), labels, **ranks)
        opened.append(loader)
        return loader

    yield opening
    for loader in opened:
        loader.close()


@pytest.fixture
def maps(folder, tmp_path):
    """Write a folder of label maps; each contains the number of its image."""
    catalog = build_catalog(str(folder), "train", None)
    for index in range(len(catalog)):
        file = (tmp_path / "maps" / catalog.name(index)).with_suffix(".pt")
        file.parent.mkdir(parents=True, exist_ok=True)
        scores = torch.full((1, 1, 2, 2), float(index))
        torch.save(torch.cat([scores, torch.zeros_like(scores)]).half(), file)
    return tmp_path / "maps"


def assert_same(batches, others):
    assert len(batches) == len(others)
    for a, b in zip(batches, others, strict=True):
        assert (a.indices == b.indices).all()
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels.classes, b.labels.classes)


def test_batches_contain_images_with_their_classes(open_loader, folder):
    loader = open_loader()
    batches = list(loader.batches(0, 0))
    assert len(batches) == loader.steps == 6
    targets = build_catalog(str(folder), "train", None).targets
    for batch in batches:
        assert (batch.images.shape, batch.images.dtype) == ((3, 3, 32, 32), torch.float32)
        assert batch.labels.classes.tolist() == targets[batch.indices].tolist()
    assert len(set(np.concatenate([batch.indices for batch in batches]))) == 18


def test_a_step_has_the_same_images_on_any_number_of_ranks(open_loader, maps):
    """A global batch of 6, divided among ranks and micro-batches in five ways, has the same data."""
    recorded = []
    for size, batch_size, accumulation in ((1, 6, 1), (2, 3, 1), (3, 2, 1), (1, 3, 2), (3, 1, 2)):
        steps = [set() for _ in range(3)]
        for rank in range(size):
            ranks = {"rank": rank, "size": size, "accumulation": accumulation}
            loader = open_loader(maps=maps, **ranks, batch_size=batch_size)
            for number, batch in enumerate(loader.batches(2, 0)):
                data = batch.images, batch.labels.maps.scores, batch.labels.maps.boxes
                for index, *image in zip(batch.indices, *data, strict=True):
                    steps[number // accumulation].add(
                        (int(index), *(each.numpy().tobytes() for each in image))
                    )
        assert [len(step) for step in steps] == [6, 6, 6]
        recorded.append(steps)
    assert all(other == recorded[0] for other in recorded)


def test_an_unfinished_epoch_does_not_change_the_next_or_the_resumed_one(open_loader):
    loader = open_loader(accumulation=2, vflip=0.5)
    expected = {epoch: list(loader.batches(epoch, 0)) for epoch in range(3)}
    for taken in (0, 1, 5, 6):
        abandoned = loader.batches(0, 0)
        for _ in range(taken):
            next(abandoned)
        assert_same(list(loader.batches(1, 0)), expected[1])
    for batch in loader.batches(0, 0):
        assert (batch.indices == expected[0][0].indices).all()
        break
    for first_step in (1, 2, 3):
        assert_same(list(loader.batches(2, first_step)), expected[2][2 * first_step :])


def test_an_epoch_ends_when_the_next_begins(open_loader):
    loader = open_loader()
    older, newer = loader.batches(0, 0), loader.batches(1, 0)
    next(older)
    loader.prepare_next()  # dropped with its epoch
    first = next(newer)
    with pytest.raises(RuntimeError, match="a later one began"):
        next(older)
    assert_same([first, *newer], list(loader.batches(1, 0)))


def test_a_prepared_batch_is_the_next_one(open_loader):
    loader = open_loader()
    expected = list(loader.batches(0, 0))
    loader.prepare_next()  # no iteration: there is nothing to prepare
    found = []
    for batch in loader.batches(0, 0):
        found.append(batch)
        loader.prepare_next()
        loader.prepare_next()  # it is prepared already, or the epoch has ended
    assert_same(found, expected)


def test_later_batches_do_not_overwrite_earlier_ones(open_loader):
    loader = open_loader()
    images = [(batch.images, batch.images.clone()) for batch in loader.batches(0, 0)]
    list(loader.batches(1, 0))
    loader.close()
    assert all(torch.equal(each, copy) for each, copy in images)


def test_label_maps_belong_to_their_images(open_loader, maps):
    """Indices and maps of a batch must agree."""
    loader = open_loader(maps=maps, aa="")
    plain = open_loader(aa="")
    for epoch in range(2):
        for batch, unlabelled in zip(loader.batches(epoch, 0), plain.batches(epoch, 0), strict=True):
            assert batch.labels.maps.ids.shape == (3, 1, 2, 2)
            assert (batch.labels.maps.scores[:, 0, 0, 0].numpy() == batch.indices).all()
            assert batch.labels.maps.boxes.dtype == torch.float32
            assert torch.equal(batch.images, unlabelled.images)


def test_a_damaged_image_in_an_unfinished_epoch(open_loader, folder):
    loader = open_loader(batch_size=5, bad_samples="skip")
    expected = {epoch: list(loader.batches(epoch, 0)) for epoch in range(2)}
    catalog = build_catalog(str(folder), "train", None)
    in_second_batch = folder / "train" / catalog.name(int(expected[0][1].indices[2]))
    whole = in_second_batch.read_bytes()
    in_second_batch.write_bytes(whole[: len(whole) // 2])
    abandoned = loader.batches(0, 0)
    assert_same([next(abandoned)], expected[0][:1])
    in_second_batch.write_bytes(whole)
    assert_same(list(loader.batches(1, 0)), expected[1])


def test_the_time_of_waiting_is_measured(open_loader):
    loader = open_loader()
    batches = loader.batches(0, 0)
    outside = 0.0
    for _ in range(6):
        began = perf_counter()
        next(batches)
        outside += perf_counter() - began
    assert 0.9 * outside - 0.01 < loader.waited_seconds <= outside


def test_a_loader_that_is_closed_yields_no_more(open_loader):
    loader = open_loader()
    left_open = loader.batches(0, 0)
    next(left_open)
    loader.close()
    loader.close()  # a second call has no effect
    with pytest.raises(RuntimeError, match="the loader was closed"):
        next(left_open)


def entries(folder: str) -> int:
    return len(list(Path(folder).iterdir()))


def test_many_loaders_leave_no_threads_files_or_memory(folder):
    """Every other loader reads a part of its epoch. Caches of libraries grow during the first ten loaders."""
    usage = []
    for start in range(15):
        catalog = build_catalog(str(folder), "train", None)
        loader = train_loader(catalog, Data(batch_size=3))
        for number, _ in enumerate(loader.batches(start, 0)):
            if start % 2 and number == 2:
                break
        loader.close()
        del catalog, loader
        gc.collect()
        # Native threads, too.
        usage.append((entries("/proc/self/task"), entries("/proc/self/fd"), host_memory_gib()))
    threads, files, memory = zip(*usage[9:], strict=True)
    assert max(threads) <= threads[0]
    assert max(files) <= files[0]
    assert memory[-1] - memory[0] < 16 / 1024


def test_the_consumer_reads_cached_batches_and_tries_others_once_an_epoch(open_loader, monkeypatch):
    loader, clock, takes = open_loader(batch_size=2, prefetch=3), 0.0, 0.0
    by_consumer, read = {}, loader._read_batch

    def timed(epoch, drawn):
        nonlocal clock
        by_consumer[drawn[0]] = threading.current_thread() is threading.main_thread()
        clock += takes
        return read(epoch, drawn)

    monkeypatch.setattr("horovod_volo.data.prefetcher.perf_counter", lambda: clock)
    monkeypatch.setattr(loader, "_read_batch", timed)
    cached = [True] * 10
    slow = [True] * 6 + [False] * 4  # four in a row are slow; two more were announced by then
    for seconds, expected in ((0.0, cached), (0.02, slow), (0.02, slow), (0.0, cached)):
        takes = seconds
        assert [by_consumer[batch.drawn[0]] for batch in loader.batches(0, 0)] == expected


@pytest.fixture
def pool():
    with closing(ImageThreadPool(2, "test")) as pool:
        yield pool


def test_threads_take_over_from_a_slow_item(pool) -> None:
    def name(item: int) -> tuple[int, int]:
        time.sleep(0.01)
        return item, threading.get_ident()

    items, done_by = zip(*pool.map(name, range(8), alone_seconds=1e-4), strict=True)
    assert items == tuple(range(8))
    assert done_by[0] == threading.get_ident()
    assert threading.get_ident() not in done_by[1:]
    assert len(set(done_by[1:])) == 2
    # The next batch does not wait for its first item.
    assert threading.get_ident() not in [by for _, by in pool.map(name, range(8), alone_seconds=1e-4)]
    # Quick items are processed alone again after one batch.
    pool.map(abs, range(8), alone_seconds=10)
    by = pool.map(lambda _: threading.get_ident(), range(8), alone_seconds=10)
    assert set(by) == {threading.get_ident()}


def test_an_error_reaches_the_caller(pool) -> None:
    for alone_seconds in (0.0, 10.0):
        with pytest.raises(ZeroDivisionError):
            pool.map(lambda item: 1 / item, range(3), alone_seconds)
