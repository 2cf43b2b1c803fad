"""The order visits each image once, and what a step sees does not depend on the number of ranks."""

import numpy as np
import pytest

from horovod_volo.data.order import epoch_order, share_of_step


def test_an_epoch_is_a_permutation_fixed_by_seed_and_epoch():
    order = epoch_order(seed=1, epoch=2, length=1000)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(1000))
    assert (order == epoch_order(seed=1, epoch=2, length=1000)).all()
    for other in (epoch_order(1, 3, 1000), epoch_order(2, 2, 1000)):
        assert (order == other).mean() < 0.01


def test_the_order_never_changes_between_versions():
    assert epoch_order(seed=42, epoch=0, length=8).tolist() == [4, 5, 1, 6, 7, 2, 0, 3]


def test_every_place_is_as_likely_for_every_image():
    places = np.array([np.argsort(epoch_order(7, epoch, 10)) for epoch in range(4000)])
    counts = np.stack([(places == place).sum(axis=0) for place in range(10)])
    chi_squared = ((counts - 400) ** 2 / 400).sum()
    assert chi_squared < 81 + 4 * np.sqrt(2 * 81)


@pytest.mark.parametrize(
    ("size", "batch", "accumulation"), [(1, 12, 1), (2, 6, 1), (3, 2, 2), (6, 1, 2), (4, 1, 3)]
)
def test_a_step_sees_the_same_images_however_they_are_shared(size, batch, accumulation):
    order = epoch_order(seed=0, epoch=0, length=40)
    for step in range(3):
        shares = [
            share_of_step(order, step, rank=rank, size=size, batch=batch, accumulation=accumulation)
            for rank in range(size)
        ]
        assert all(share.shape == (accumulation, batch) for share in shares)
        seen = np.concatenate([share.ravel() for share in shares])
        assert sorted(seen) == sorted(order[12 * step : 12 * step + 12])


def test_a_rank_reads_every_size_th_position_from_its_own():
    share = share_of_step(np.arange(100), 2, rank=1, size=3, batch=2, accumulation=2)
    assert share.tolist() == [[25, 28], [31, 34]]
