"""The networks against the published ones with equal weights, also at 384 pixels and in odd batches."""

from __future__ import annotations

import pytest
import torch

from tests.published.checkouts import PublishedCode
from tests.published.conftest import compare
from tests.published.pairs import BOX, NAMES, box_on, compare_training, pair_of
from tests.unit import test_models_published_figures as figures
from tests.unit.network_samples import random_images


@pytest.mark.parametrize("name", NAMES)
def test_a_network(name: str, published: PublishedCode) -> None:
    """Names and shapes, logits of evaluation, rates of drop path, and from images to gradients."""
    pair = pair_of(published, name, drop_path=0.3)
    ours, theirs = (
        {name: tensor.shape for name, tensor in model.state_dict().items()}
        for model in (pair.ours, pair.theirs)
    )
    assert ours == theirs
    named = [{name for name, _ in model.named_parameters()} for model in (pair.ours, pair.theirs)]
    assert named[0] == named[1]
    assert pair.ours.no_weight_decay() == pair.theirs.no_weight_decay()
    with torch.inference_mode():
        images = random_images(2, 224)
        compare(f"{name}, evaluation", pair.ours.eval()(images), pair.theirs.eval()(images))
    compare_training(published, pair, 2, BOX)


@pytest.mark.parametrize(
    ("name", "batch", "side"),
    [("volo_d1", 2, 384), ("lvvit_s", 2, 384), ("volo_d1", 3, 224), ("lvvit_t", 3, 224)],
)
def test_384_pixels_and_odd_batches(name: str, batch: int, side: int, published: PublishedCode) -> None:
    """The middle image of an odd batch is its own MixToken partner."""
    pair, images = pair_of(published, name, img_size=side), random_images(batch, side)
    with torch.inference_mode():
        evaluated = pair.ours.eval()(images)
        compare(f"{name}, evaluation at {side} px", evaluated, pair.theirs.eval()(images))
    compare_training(published, pair, batch, box_on(side // 16), img_size=side)


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_t"])
def test_drop_path(name: str, published: PublishedCode) -> None:
    """Ours computes a branch only for the images that keep it, the published code for all of them."""
    pair = pair_of(published, name, img_size=64, drop_path=0.9)
    counts = {len(rows) for _, rows in compare_training(published, pair, 3, box_on(4), img_size=64)}
    assert 0 in counts  # a branch that no image keeps
    assert len(counts) > 2


@pytest.mark.parametrize("name", figures.FIGURES)
@torch.inference_mode()
def test_the_recorded_figures_are_of_the_published_networks(name: str, published: PublishedCode) -> None:
    """Those that the unit tests compare our networks with; a failure shows them anew."""
    model = published.network(name)
    figures.fill(model)
    images = figures.images(2, 224)
    with published.fixed_box(name, figures.BOX):
        found = {"evaluation": figures.summary(model.eval()(images))}
        class_logits, token_logits, _ = model.train()(images)
    found |= {"class": figures.summary(class_logits), "tokens": figures.summary(token_logits)}
    recorded = figures.FIGURES[name].items()
    assert found == {what: pytest.approx(values, abs=1e-4) for what, values in recorded}
