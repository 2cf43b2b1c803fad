"""The networks against the published ones with equal weights, also at 384 pixels and in odd batches."""

from __future__ import annotations

import pytest
import torch

from tests.published.checkouts import PublishedCode, named_folder
from tests.published.conftest import Compare
from tests.published.examples import BOX, box_on
from tests.published.pairs import NAMES, Pair, compare_statistics, compare_training, pair_of
from tests.unit.network_samples import random_images

named_folder()  # skips this module without checkouts

LARGE = ("volo_d4", "volo_d5", "lvvit_l")


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, published: PublishedCode) -> Pair:
    """Return each network with the published one."""
    return pair_of(published, request.param)


def batch_size_of(pair: Pair) -> int:
    """Return the batch size, which is smaller for large networks."""
    return 2 if pair.name in LARGE else 4


def test_names_and_shapes(pair: Pair) -> None:
    ours, theirs = (
        {name: tensor.shape for name, tensor in model.state_dict().items()}
        for model in (pair.ours, pair.theirs)
    )
    assert ours == theirs
    assert {name for name, _ in pair.ours.named_parameters()} == {
        name for name, _ in pair.theirs.named_parameters()
    }
    assert pair.ours.no_weight_decay() == pair.theirs.no_weight_decay()


@torch.inference_mode()
def test_evaluation(pair: Pair, compare: Compare) -> None:
    images = random_images(batch_size_of(pair), 224)
    compare(f"{pair.name}, evaluation", pair.ours.eval()(images), pair.theirs.eval()(images))


@torch.inference_mode()
def test_training_logits(pair: Pair, published: PublishedCode, compare: Compare) -> None:
    images = random_images(batch_size_of(pair), 224)
    class_logits, token_logits = pair.ours.train().training_logits(images, BOX.swap_tokens)
    with published.fixed_box(pair.name, BOX):
        of_class, of_tokens, corners = pair.theirs.train()(images)
    assert corners == (3, 5, 10, 9)
    compare(f"{pair.name}, class logits in training", class_logits, of_class)
    compare(f"{pair.name}, token logits in training", token_logits, of_tokens)
    compare_statistics(pair.name, pair.ours, pair.theirs)


def test_from_images_to_gradients(pair: Pair, published: PublishedCode, compare: Compare) -> None:
    compare_training(published, compare, pair, batch_size_of(pair), BOX)


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_s"])
def test_384_pixels(published: PublishedCode, compare: Compare, name: str) -> None:
    pair, images, box = pair_of(published, name, img_size=384), random_images(2, 384), box_on(24)
    with torch.inference_mode():
        evaluated = pair.ours.eval()(images)
        compare(f"{name}, evaluation at 384 px", evaluated, pair.theirs.eval()(images))
    compare_training(published, compare, pair, 2, box, img_size=384)


@pytest.mark.parametrize("batch", [3, 5])  # the middle image is its own MixToken partner
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
