"""The networks against the published ones at other sizes: 384 pixels and odd batches."""

from __future__ import annotations

import pytest
import torch

from tests.published.checkouts import PublishedCode, named_folder
from tests.published.conftest import Compare
from tests.published.examples import box_on
from tests.published.pairs import compare_statistics, compare_training, pair_of
from tests.unit.network_samples import random_images

named_folder()  # skips this module without checkouts

# In an odd batch the middle image is its own MixToken partner.
ODD = pytest.mark.parametrize("batch", [3, 5])


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_s"])
def test_384_pixels(published: PublishedCode, compare: Compare, name: str) -> None:
    pair, images, box = pair_of(published, name, img_size=384), random_images(2, 384), box_on(24)
    with torch.inference_mode():
        evaluated = pair.ours.eval()(images)
        compare(f"{name}, evaluation at 384 px", evaluated, pair.theirs.eval()(images))
    compare_training(published, compare, pair, 2, box, img_size=384)


@ODD
@pytest.mark.parametrize("name", ["volo_d1", "lvvit_t"])
def test_odd_batches(published: PublishedCode, compare: Compare, name: str, batch: int) -> None:
    pair, images, box = pair_of(published, name), random_images(batch, 224), box_on(14)
    with torch.inference_mode(), published.fixed_box(name, box):
        class_logits, token_logits = pair.ours.train().training_logits(images, box.swap_tokens)
        of_class, of_tokens, _ = pair.theirs.train()(images)
    compare(f"{name}, class logits of {batch}", class_logits, of_class)
    compare(f"{name}, token logits of {batch}", token_logits, of_tokens)
    compare_statistics(name, pair.ours, pair.theirs)
    compare_training(published, compare, pair, batch, box)
