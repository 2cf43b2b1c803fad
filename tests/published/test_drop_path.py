"""Drop path against the published one: the rates of all blocks, and our draws in both networks.

Ours computes a branch only for the images that keep it; the published code computes it for all images and
multiplies by zero.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from horovod_volo.models.blocks import Block
from horovod_volo.models.build import build_model
from horovod_volo.models.lvvit import LvVit
from tests.published.checkouts import PublishedCode, named_folder
from tests.published.conftest import compare
from tests.published.drop_path import record_draws_of_ours, use_draws_in_published
from tests.published.examples import CLASSES, box_on, labels_of, published_target
from tests.published.pairs import compare_gradients, pair_of
from tests.unit.network_samples import random_images

named_folder()  # skips this module without checkouts

BATCH, PIXELS, SIDE = 3, 64, 4
BOX = box_on(SIDE)
RATES = {"volo_d1": 0.1, "volo_d2": 0.2, "volo_d3": 0.5, "volo_d4": 0.5, "volo_d5": 0.75}
RATES |= {"lvvit_t": 0.1, "lvvit_s": 0.1, "lvvit_m": 0.2, "lvvit_l": 0.3}
BLOCKS = {"volo_d1": 14, "volo_d2": 18, "volo_d3": 28, "volo_d4": 28, "volo_d5": 36}
BLOCKS |= {"lvvit_t": 11, "lvvit_s": 15, "lvvit_m": 19, "lvvit_l": 23}


@pytest.mark.parametrize("name", RATES)
def test_rates(name: str, published: PublishedCode) -> None:
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


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_t", "lvvit_s"])
def test_the_published_with_our_draws(name: str, published: PublishedCode) -> None:
    pair = pair_of(published, name, img_size=PIXELS, drop_path=0.75)
    own, other = (random_images(BATCH, PIXELS).requires_grad_() for _ in range(2))
    torch.manual_seed(1)
    with record_draws_of_ours() as draws:
        ours = pair.our_loss(own, labels_of(BATCH, 3), BOX)
    with use_draws_in_published(published, draws):
        theirs = pair.published_loss(published, other, published_target(published, BATCH, 3, SIDE), BOX)
    compare(f"{name}, our draws, loss", ours, theirs)
    ours.backward()
    theirs.backward()
    compare_gradients(f"{name}, our draws", pair, own, other)
    counts = {len(rows) for _, rows in draws}
    assert {0, BATCH} < counts  # there is a branch that no image keeps, one that all keep, and others
