"""The networks against the published ones with equal weights, also at 384 pixels and in odd batches."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from horovod_volo.models.blocks import Block
from horovod_volo.models.build import build_model
from horovod_volo.models.lvvit import LvVit
from tests.published.checkouts import PublishedCode, named_folder
from tests.published.conftest import compare
from tests.published.examples import BOX, CLASSES, box_on
from tests.published.pairs import NAMES, compare_statistics, compare_training, pair_of
from tests.unit.network_samples import random_images

named_folder()  # skips this module without checkouts
sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from formula_weights import fill  # noqa: E402
from formula_weights import images as formula_images  # noqa: E402
from test_models_published_figures import BOX as FIGURES_BOX  # noqa: E402
from test_models_published_figures import FIGURES, summary  # noqa: E402

# The published rate of drop path of each network, and its blocks with drop path.
RATES = {"volo_d1": 0.1, "volo_d2": 0.2, "volo_d3": 0.5, "volo_d4": 0.5, "volo_d5": 0.75}
RATES |= {"lvvit_t": 0.1, "lvvit_s": 0.1, "lvvit_m": 0.2, "lvvit_l": 0.3}
BLOCKS = {"volo_d1": 14, "volo_d2": 18, "volo_d3": 28, "volo_d4": 28, "volo_d5": 36}
BLOCKS |= {"lvvit_t": 11, "lvvit_s": 15, "lvvit_m": 19, "lvvit_l": 23}


@pytest.mark.parametrize("name", NAMES)
def test_a_network(name: str, published: PublishedCode) -> None:
    """Names and shapes, logits of evaluation, and from images to gradients."""
    pair = pair_of(published, name)
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


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_s"])
def test_384_pixels(published: PublishedCode, name: str) -> None:
    pair, images, box = pair_of(published, name, img_size=384), random_images(2, 384), box_on(24)
    with torch.inference_mode():
        evaluated = pair.ours.eval()(images)
        compare(f"{name}, evaluation at 384 px", evaluated, pair.theirs.eval()(images))
    compare_training(published, pair, 2, box, img_size=384)


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_t"])
def test_an_odd_batch(published: PublishedCode, name: str) -> None:
    batch = 3  # the middle image is its own MixToken partner
    pair, images, box = pair_of(published, name), random_images(batch, 224), box_on(14)
    with torch.inference_mode(), published.fixed_box(name, box):
        class_logits, token_logits = pair.ours.train().training_logits(images, box.swap_tokens)
        of_class, of_tokens, corners = pair.theirs.train()(images)
    assert corners == (3, 5, 10, 9)
    compare(f"{name}, class logits of {batch}", class_logits, of_class)
    compare(f"{name}, token logits of {batch}", token_logits, of_tokens)
    compare_statistics(name, pair.ours, pair.theirs)
    compare_training(published, pair, batch, box)


@pytest.mark.parametrize("name", RATES)
def test_the_rates_of_drop_path(name: str, published: PublishedCode) -> None:
    rate = RATES[name]
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):  # without memory for the weights
        patch.setattr(torch, "linspace", partial(torch.linspace, device="cpu"))
        ours = build_model(name, img_size=224, num_classes=CLASSES, drop_path=rate)
        theirs = published.network(name, drop_path=rate)
    # Outlookers and class attention have no drop path, and LV-ViT's first block has a rate of 0.
    assert our_rates(ours) == pytest.approx(published_rates(theirs), rel=1e-6)
    assert len(our_rates(ours)) == BLOCKS[name]


def our_rates(model: torch.nn.Module) -> list[float]:
    """Return the rates of all blocks with drop path, in order."""
    if isinstance(model, LvVit):
        return [rate for rate in model.rates if rate]
    pairs = [block.rates for block in model.modules() if isinstance(block, Block)]
    assert all(first == second for first, second in pairs)  # of attention and MLP
    return [first for first, _ in pairs if first]


def published_rates(model: torch.nn.Module) -> list[float]:
    """Return the rates of a published network, whose blocks have one drop path module for both branches."""
    blocks = [getattr(block, "drop_path", None) for block in model.modules()]
    return [block.drop_prob for block in blocks if getattr(block, "drop_prob", 0.0)]


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_t"])
def test_drop_path(name: str, published: PublishedCode) -> None:
    """Ours computes a branch only for the images that keep it, the published code for all of them."""
    pair = pair_of(published, name, img_size=64, drop_path=0.9)
    counts = {len(rows) for _, rows in compare_training(published, pair, 3, box_on(4), img_size=64)}
    assert 0 in counts  # a branch that no image keeps
    assert len(counts) > 2


@pytest.mark.parametrize("name", FIGURES)
@torch.inference_mode()
def test_the_recorded_figures_are_of_the_published_networks(name: str, published: PublishedCode) -> None:
    """Those that the unit tests compare our networks with; a failure shows them anew."""
    model = published.network(name)
    fill(model)
    images = formula_images(2, 224)
    with published.fixed_box(name, FIGURES_BOX):
        found = {"evaluation": summary(model.eval()(images))}
        class_logits, token_logits, _ = model.train()(images)
    found |= {"class": summary(class_logits), "tokens": summary(token_logits)}
    assert found == {what: pytest.approx(figures, abs=1e-4) for what, figures in FIGURES[name].items()}
