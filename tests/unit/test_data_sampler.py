"""An epoch contains each image once, and a step's images do not depend on the number of ranks."""

import numpy as np
import pytest

from horovod_volo.data.sampler import epoch_order, rank_indices

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
    by_rank = [
        rank_indices(order, 1, rank=rank, size=3, global_batch=32, accumulation=2) for rank in range(3)
    ]
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
