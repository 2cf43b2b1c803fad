"""The shape of a run by arithmetic: global batch, steps, peak learning rate, and what does not fit."""

from __future__ import annotations

import re
from typing import Any

import pytest

from horovod_volo.config.derived import derive
from horovod_volo.config.errors import UserError
from horovod_volo.config.schema import Config
from horovod_volo.config.values import assemble

IMAGENET = 1_281_167


def config(**chosen: Any) -> Config:
    return assemble(chosen, fallback_name="")


@pytest.mark.parametrize(
    ("ranks", "batch", "accumulation", "images", "global_batch", "steps", "peak"),
    [
        (8, 128, 1, IMAGENET, 1024, 1251, 1.6e-3),
        (40, 25, 1, IMAGENET, 1000, 1281, 1.6e-3 * 1000 / 1024),  # forty ranks do not divide 1024
        (40, 26, 1, IMAGENET, 1040, 1231, 1.625e-3),
        (40, 6, 4, IMAGENET, 960, 1334, 1.5e-3),
        (8, 16, 8, IMAGENET, 1024, 1251, 1.6e-3),  # the batch of the first, in eight passes
        (1, 32, 1, 100, 32, 3, 5e-5),  # four images are left out of each epoch
        (2, 50, 1, 100, 100, 1, 1.5625e-4),  # all images in one step
        (3, 7, 2, 85, 42, 2, 6.5625e-5),
    ],
)
def test_a_run_takes_its_shape(
    ranks: int, batch: int, accumulation: int, images: int, global_batch: int, steps: int, peak: float
) -> None:
    derived = derive(config(batch_size=batch, accumulation=accumulation), ranks=ranks, images=images)
    assert derived.ranks == ranks
    assert derived.global_batch == global_batch
    assert derived.steps_per_epoch == steps
    assert derived.epochs == 310
    assert derived.total_steps == 310 * steps
    assert derived.cosine_steps == 300 * steps
    assert derived.warmup_steps == 20 * steps
    assert derived.prefix_steps == 0  # it is inside
    assert derived.peak_lr == pytest.approx(peak, rel=1e-12)


def test_a_learning_rate_that_is_given_is_not_scaled() -> None:
    given = config(lr=1e-4, lr_base=0.5, batch_size=44)
    assert derive(given, ranks=8, images=IMAGENET).peak_lr == 1e-4
    assert derive(given, ranks=80, images=IMAGENET).peak_lr == 1e-4


def test_a_warm_up_that_comes_before_makes_the_run_longer() -> None:
    given = config(epochs=10, warmup_epochs=3, cooldown_epochs=2, warmup_prefix=True, batch_size=10)
    derived = derive(given, ranks=1, images=40)
    assert (derived.epochs, derived.total_steps) == (15, 60)
    assert (derived.warmup_steps, derived.prefix_steps, derived.cosine_steps) == (12, 12, 40)


def test_a_step_knows_its_epoch() -> None:
    derived = derive(config(batch_size=10), ranks=1, images=39)
    assert [derived.epoch_of(step) for step in range(7)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
        (2, 0),
    ]


@pytest.mark.parametrize(
    ("ranks", "batch", "accumulation", "images"),
    [(2, 128, 1, 200), (1, 11, 1, 10), (4, 10, 3, 119), (40, 128, 1, 5000), (3, 1000, 7, 21)],
)
def test_the_batch_named_when_a_step_is_too_large_is_the_largest_that_works(
    ranks: int, batch: int, accumulation: int, images: int
) -> None:
    with pytest.raises(UserError, match=f"there are {images}\\. Use --batch-size") as raised:
        derive(config(batch_size=batch, accumulation=accumulation), ranks=ranks, images=images)
    match = re.search(r"Use --batch-size (\d+) or less", str(raised.value))
    assert match is not None
    named = int(match[1])
    assert derive(
        config(batch_size=named, accumulation=accumulation), ranks=ranks, images=images
    ).steps_per_epoch
    with pytest.raises(UserError):
        derive(config(batch_size=named + 1, accumulation=accumulation), ranks=ranks, images=images)


def test_more_ranks_than_images_asks_for_fewer_ranks() -> None:
    with pytest.raises(UserError, match="Start at most 7 ranks with --accumulation 1") as raised:
        derive(config(batch_size=1), ranks=8, images=7)
    assert "8 ranks x 1 images x 1 passes = 8 images, but there are 7" in str(raised.value)
    assert derive(config(batch_size=1), ranks=7, images=7).global_batch == 7
