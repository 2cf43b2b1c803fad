"""Training images grow from --first-size to --img-size."""

from dataclasses import replace

import pytest
import torch

from horovod_volo.config.schema import Model
from horovod_volo.core.errors import UserError
from horovod_volo.engine.image_size import check_first_size, resized, training_side

GROWING = Model(img_size=64, first_size=32, full_size_after=0.5)


def test_sides_are_held_equally_long_and_the_full_one_from_the_given_part_on() -> None:
    sides = [training_side(GROWING, 16, step, 100) for step in range(100)]
    assert sides == [32] * 25 + [48] * 25 + [64] * 50


@pytest.mark.parametrize("without", [{"first_size": 0}, {"full_size_after": 0.0}], ids=str)
def test_without_growth_all_steps_have_the_full_side(without: dict[str, float]) -> None:
    assert {training_side(replace(GROWING, **without), 16, step, 100) for step in range(100)} == {64}


def test_a_pixel_is_the_mean_of_what_it_covers() -> None:
    images = torch.arange(64.0).view(1, 1, 8, 8)
    torch.testing.assert_close(resized(images, 4).mean(), images.mean())


@pytest.mark.parametrize(
    ("settings", "stride", "named"),
    [
        (Model(img_size=64, first_size=40), 16, "multiples of 16 below --img-size, which is 64, not 40"),
        (Model(img_size=64, first_size=64), 16, "Use --first-size 32"),
        (Model(model="resnet50", first_size=128), 0, "resnet50 has none"),
    ],
)
def test_a_first_size_that_cannot_be(settings: Model, stride: int, named: str) -> None:
    with pytest.raises(UserError, match=named):
        check_first_size(settings, stride)
