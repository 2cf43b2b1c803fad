"""An epoch has each image once, or rare classes more often; ranks and restarts share its order."""

from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from coded_images import smooth, train_loader, write_images

from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import TrainBatch
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.sampler import (
    balanced_order,
    draws_of_classes,
    epoch_order,
    rank_indices,
    repeated_order,
)

SHUFFLES = [(1000, 0, 1), (1000, 10, 4), (1003, 10, 4), (7, 10, 2), (1, 1, 1)]


@pytest.mark.parametrize(("length", "block", "window"), SHUFFLES)
def test_an_epoch_is_a_permutation_fixed_by_its_arguments(length, block, window):
    order = epoch_order(1, 2, length, block=block, window=window)
    assert order.dtype == np.uint32
    assert sorted(order) == list(range(length))
    assert (order == epoch_order(1, 2, length, block=block, window=window)).all()
    if length > 100:
        for seed, epoch in ((1, 3), (2, 2)):
            assert (order == epoch_order(seed, epoch, length, block=block, window=window)).mean() < 0.05
        assert block == 0 or (order == epoch_order(1, 2, length)).mean() < 0.05


def test_the_order_never_changes_between_versions():
    assert epoch_order(seed=42, epoch=0, length=8).tolist() == [2, 3, 5, 0, 1, 4, 7, 6]
    assert epoch_order(seed=0, epoch=0, length=8, block=2, window=2).tolist() == [4, 0, 5, 1, 3, 2, 7, 6]


@pytest.mark.parametrize(("length", "block"), [(10, 0), (12, 2)])
def test_every_image_is_equally_likely_at_every_position(length, block):
    orders = [epoch_order(7, epoch, length, block=block, window=2) for epoch in range(4000)]
    places = np.array([np.argsort(order) for order in orders])
    counts = np.stack([(places == place).sum(axis=0) for place in range(length)])
    freedom, expected = (length - 1) ** 2, 4000 / length
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert chi_squared < freedom + 4 * np.sqrt(2 * freedom) * (2 if block else 1)


def test_a_rank_reads_each_position_that_equals_its_rank_modulo_size():
    parts = rank_indices(np.arange(100, dtype=np.uint32), 2, rank=1, size=3, global_batch=12, accumulation=2)
    assert all(part.dtype == np.int64 for part in parts)
    assert [part.tolist() for part in parts] == [[25, 28], [31, 34]]


def test_ranks_and_micro_batches_differ_by_one_image_at_most():
    order = np.arange(64, dtype=np.uint32)
    how = {"size": 3, "global_batch": 32, "accumulation": 2}
    by_rank = [rank_indices(order, 1, rank=rank, **how) for rank in range(3)]
    assert [[len(part) for part in parts] for parts in by_rank] == [[6, 5], [6, 5], [5, 5]]
    together = np.concatenate([part for parts in by_rank for part in parts])
    assert sorted(together) == list(range(32, 64))


def test_a_shuffle_window_mixes_the_images_of_its_blocks():
    order = epoch_order(3, 0, 64 * 100, block=64, window=5)
    windows = order.reshape(20, 5 * 64)
    blocks = windows // 64
    assert all(len(set(row)) == 5 for row in blocks)
    assert sorted(set(blocks.ravel())) == list(range(100))
    # Two neighbours in the order come from the same block with a probability of about one in five.
    same = (blocks[:, 1:] == blocks[:, :-1]).mean()
    assert 0.17 < same < 0.23
    # Blocks are not read in their stored order.
    assert (np.diff(blocks[:, 0].astype(np.int64)) > 0).mean() < 0.8


COUNTS = np.array([900, 90, 9, 0, 1])
TARGETS = np.random.default_rng(0).permutation(np.repeat(np.arange(5), COUNTS)).astype(np.int32)
IMAGES = len(TARGETS)


@pytest.mark.parametrize(
    ("balance", "expected"), [(0.0, COUNTS), (1.0, [250, 250, 250, 0, 250]), (0.5, [690, 218, 69, 0, 23])]
)
def test_classes_get_their_part_of_an_epoch(balance: float, expected: list[int]) -> None:
    roots = COUNTS.astype(float) ** (1 - balance) * (COUNTS > 0)
    draws = draws_of_classes(COUNTS, balance)
    assert draws.sum() == IMAGES
    assert np.abs(draws - IMAGES * roots / roots.sum()).max() < 1
    assert draws.tolist() == list(expected)


@pytest.mark.parametrize("balance", [0.5, 1.0])
def test_an_epoch_has_the_planned_draws(balance: float) -> None:
    order = balanced_order(3, 4, TARGETS, balance)
    assert len(order) == len(set(order.tolist())) == IMAGES
    images, copies = order % IMAGES, order // IMAGES
    drawn = np.bincount(TARGETS[images], minlength=5)
    assert (drawn == draws_of_classes(COUNTS, balance)).all()
    times = np.bincount(images, minlength=IMAGES)
    for number in (0, 1, 2, 4):
        of_class = times[number == TARGETS]
        assert of_class.max() - of_class.min() <= 1
    assert all(set(copies[images == image]) == set(range(times[image])) for image in range(IMAGES))
    assert (order == balanced_order(3, 4, TARGETS, balance)).all()
    for other in (balanced_order(3, 5, TARGETS, balance), balanced_order(4, 4, TARGETS, balance)):
        assert (order == other).mean() < 0.05
        assert set(other.tolist()) != set(order.tolist())  # other images of the frequent class
    first = np.flatnonzero(TARGETS == 4)[0]
    places = np.flatnonzero(images == first)
    assert places.std() > IMAGES / 5  # not in one place


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_repeats_of_an_image_are_in_one_step_and_an_epoch_stays_as_long(ranks: int) -> None:
    order = epoch_order(3, 4, 14)
    numbers = repeated_order(order, 3)
    assert (numbers % 14).tolist() == np.repeat(order, 3)[:14].tolist()
    assert (numbers // 14).tolist() == [0, 1, 2] * 4 + [0, 1]
    settings: dict[str, int] = {"size": ranks, "global_batch": 6, "accumulation": 1}
    for rank in range(ranks):
        (part,) = rank_indices(numbers, 1, rank=rank, **settings)
        assert part.tolist() == numbers[6:12][rank::ranks].tolist()
        assert ranks < 3 or len(set(part % 14)) == len(part)  # copies are on different ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return images of two classes, 2 and 14 of them."""
    images = {f"train/{'a' if n < 2 else 'b'}/{n:02d}.png": smooth(60, 50, seed=n) for n in range(16)}
    return write_images(tmp_path / "images", images)


def batches_of(
    folder: Path, settings: Data, first_step: int = 0, *, rank: int = 0, size: int = 1
) -> list[TrainBatch]:
    catalog = build_catalog(str(folder), "train", None)
    settings = replace(settings, batch_size=8 // size)
    with closing(train_loader(catalog, settings, rank=rank, size=size)) as loader:
        return list(loader.batches(1, first_step))


@pytest.mark.parametrize("settings", [Data(balance=1.0), Data(aug_repeats=4)])
def test_ranks_and_restarts_see_the_same_draws_each_augmented_differently(folder, settings):
    alone = batches_of(folder, settings)
    pixels = {
        number: image
        for batch in alone
        for number, image in zip(batch.drawn.tolist(), batch.images, strict=True)
    }
    assert len(pixels) == 16
    if settings.balance:
        assert Counter(number % 16 // 2 > 0 for number in pixels) == {False: 8, True: 8}
    first = 0 if settings.balance else alone[0].indices[0]
    copies = [pixels[number] for number in pixels if number % 16 == first]
    assert len(copies) == 4
    assert not any(torch.equal(copies[0], other) for other in copies[1:])
    (resumed,) = batches_of(folder, settings, 1)
    assert torch.equal(resumed.images, alone[1].images)
    for rank in range(2):
        for whole, part in zip(alone, batches_of(folder, settings, rank=rank, size=2), strict=True):
            assert (part.drawn == whole.drawn[rank::2]).all()
            assert torch.equal(part.images, whole.images[rank::2])
            assert (part.indices == part.drawn % 16).all()
