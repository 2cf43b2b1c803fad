"""The networks against the published ones with the same weights: logits, losses, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.published.checkouts import PublishedCode, named_folder
from tests.published.conftest import Compare
from tests.published.examples import BOX
from tests.published.pairs import NAMES, Pair, compare_statistics, compare_training, pair_of
from tests.unit.network_samples import random_images

named_folder()  # skips this module without checkouts

LARGE = ("volo_d4", "volo_d5", "lvvit_l")
PARAMETERS = {
    "volo_d1": 26_632_040,
    "volo_d2": 58_678_336,
    "volo_d3": 86_325_072,
    "volo_d4": 192_961_520,
    "volo_d5": 295_455_584,
    "lvvit_t": 8_534_720,
    "lvvit_s": 26_151_824,
    "lvvit_m": 55_830_544,
    "lvvit_l": 150_021_968,
}


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, published: PublishedCode) -> Pair:
    """Return each network with the published one."""
    return pair_of(published, request.param)


def batch_size_of(pair: Pair) -> int:
    """Return the batch size, which is smaller for large networks."""
    return 2 if pair.name in LARGE else 4


def test_names_shapes_and_counts(pair: Pair) -> None:
    ours, theirs = (
        {name: tensor.shape for name, tensor in model.state_dict().items()}
        for model in (pair.ours, pair.theirs)
    )
    assert ours == theirs
    assert {name for name, _ in pair.ours.named_parameters()} == {
        name for name, _ in pair.theirs.named_parameters()
    }
    for model in (pair.ours, pair.theirs):
        assert sum(map(Tensor.numel, model.parameters())) == PARAMETERS[pair.name]
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
