"""With --balance rare classes are drawn more often, by a plan that ranks and restarts share."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from coded_images import smooth, write_images
from image_loaders import train_loader

from horovod_volo.config.data_settings import Data
from horovod_volo.core.batch import TrainBatch
from horovod_volo.data.images.catalog import build_catalog
from horovod_volo.data.sampler import balanced_order, draws_of_classes

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return images of two classes, 2 and 14 of them."""
    names = [f"train/{'a' if number < 2 else 'b'}/{number:02d}.png" for number in range(16)]
    return write_images(
        tmp_path / "images", {name: smooth(60, 50, seed=number) for number, name in enumerate(names)}
    )


def batches_of(
    folder: Path, first_step: int = 0, *, rank: int = 0, size: int = 1, epoch: int = 1
) -> list[TrainBatch]:
    catalog = build_catalog(str(folder), "train", None)
    with closing(
        train_loader(catalog, Data(batch_size=8 // size, balance=1.0), rank=rank, size=size)
    ) as loader:
        return list(loader.batches(epoch, first_step))


def test_ranks_and_restarts_see_the_same_draws_each_augmented_differently(folder: Path) -> None:
    alone = batches_of(folder)
    pixels = {
        number: image
        for batch in alone
        for number, image in zip(batch.drawn.tolist(), batch.images, strict=True)
    }
    assert len(pixels) == 16
    assert Counter(number % 16 // 2 > 0 for number in pixels) == {False: 8, True: 8}
    copies = [pixels[number] for number in pixels if number % 16 == 0]
    assert len(copies) == 4
    assert not any(torch.equal(copies[0], other) for other in copies[1:])
    (resumed,) = batches_of(folder, 1)
    assert torch.equal(resumed.images, alone[1].images)
    for rank in range(2):
        for whole, part in zip(alone, batches_of(folder, rank=rank, size=2), strict=True):
            assert (part.drawn == whole.drawn[rank::2]).all()
            assert torch.equal(part.images, whole.images[rank::2])
            assert (part.indices == part.drawn % 16).all()
