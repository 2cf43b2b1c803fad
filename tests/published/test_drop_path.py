"""Drop path against the published one: the rates of all blocks, and the same draws in both networks.

Ours computes a branch for those images alone that keep it; the published code computes all and multiplies
by zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import horovod_volo.models.lvvit as our_lvvit
import horovod_volo.models.volo as our_volo
from horovod_volo.models.blocks import Block
from horovod_volo.models.build import build_model
from horovod_volo.models.lvvit import LvVit
from horovod_volo.models.stochastic_depth import ALL, Kept, draw_kept
from tests.published.checkouts import Published, named_folder
from tests.published.conftest import Compare
from tests.published.examples import CLASSES, box_on, labels_of, published_target
from tests.published.pairs import Pair, compare_gradients, pair_of
from tests.unit.network_samples import random_images

named_folder()  # or this module is skipped

BATCH, PIXELS, SIDE = 3, 64, 4
BOX = box_on(SIDE)
RATES = {"volo_d1": 0.1, "volo_d2": 0.2, "volo_d3": 0.5, "volo_d4": 0.5, "volo_d5": 0.75}
RATES |= {"lvvit_t": 0.1, "lvvit_s": 0.1, "lvvit_m": 0.2, "lvvit_l": 0.3}
BLOCKS = {"volo_d1": 14, "volo_d2": 18, "volo_d3": 28, "volo_d4": 28, "volo_d5": 36}
BLOCKS |= {"lvvit_t": 11, "lvvit_s": 15, "lvvit_m": 19, "lvvit_l": 23}

Draw = tuple[float, Tensor]  # a branch's rate, and the images that keep it


@pytest.mark.parametrize("name", RATES)
def test_rates(name: str, published: Published) -> None:
    rate = RATES[name]
    with pytest.MonkeyPatch.context() as patch, torch.device("meta"):  # without memory
        patch.setattr(torch, "linspace", partial(torch.linspace, device="cpu"))
        ours = build_model(name, img_size=224, num_classes=CLASSES, drop_path=rate)
        theirs = published.network(name, drop_path=rate)
    # Outlookers and class attention have none, and LV-ViT's first block has a rate of 0.
    assert our_rates(ours) == pytest.approx(published_rates(theirs), rel=1e-6)
    assert len(our_rates(ours)) == BLOCKS[name]


def our_rates(model: torch.nn.Module) -> list[float]:
    """Return the rate of each block that has one, from the first to the last."""
    if isinstance(model, LvVit):
        return [rate for rate in model.rates if rate]
    pairs = [block.rates for block in model.modules() if isinstance(block, Block)]
    assert all(first == second for first, second in pairs)  # of attention and perceptron
    return [first for first, _ in pairs if first]


def published_rates(model: torch.nn.Module) -> list[float]:
    """Return the same of a published network, whose blocks have one module for both branches."""
    blocks = [getattr(block, "drop_path", None) for block in model.modules()]
    return [block.drop_prob for block in blocks if getattr(block, "drop_prob", 0.0)]


NETWORKS = pytest.mark.parametrize("name", ["volo_d1", "lvvit_t", "lvvit_s"])


@NETWORKS
def test_ours_with_published_draws(name: str, published: Published, compare: Compare) -> None:
    pair = pair_of(published, name, img_size=PIXELS, drop_path=0.75)
    own, other = (random_images(BATCH, PIXELS).requires_grad_() for _ in range(2))
    torch.manual_seed(1)
    with recorded_published_draws(pair.theirs) as draws:
        theirs = pair.published_loss(published, other, published_target(published, BATCH, 3, SIDE), BOX)
    with ours_draw(draws):
        ours = pair.our_loss(own, labels_of(BATCH, 3), BOX)
    compare_passes(compare, f"{name}, published draws", pair, ours, theirs, own, other)
    counts = {len(rows) for _, rows in draws}
    assert {0, BATCH} < counts  # a branch that nobody keeps, one that all keep, and others


@NETWORKS
def test_the_published_with_our_draws(name: str, published: Published, compare: Compare) -> None:
    pair = pair_of(published, name, img_size=PIXELS, drop_path=0.75)
    own, other = (random_images(BATCH, PIXELS).requires_grad_() for _ in range(2))
    torch.manual_seed(1)
    with recorded_draws_of_ours() as draws:
        ours = pair.our_loss(own, labels_of(BATCH, 3), BOX)
    with the_published_draw(published, draws):
        theirs = pair.published_loss(published, other, published_target(published, BATCH, 3, SIDE), BOX)
    compare_passes(compare, f"{name}, our draws", pair, ours, theirs, own, other)


def compare_passes(
    compare: Compare, what: str, pair: Pair, ours: Tensor, theirs: Tensor, own: Tensor, other: Tensor
) -> None:
    """Compare two losses and, behind them, all gradients."""
    compare(f"{what}, loss", ours, theirs)
    ours.backward()
    theirs.backward()
    compare_gradients(compare, what, pair, own, other)


@contextmanager
def recorded_published_draws(model: torch.nn.Module) -> Iterator[list[Draw]]:
    """List what the modules of a published network draw, branch by branch."""
    draws: list[Draw] = []

    def record(module: Any, _: Any, kept: Tensor) -> None:
        draws.append((module.drop_prob, kept.flatten(1).any(dim=1).nonzero().flatten()))

    hooks = [m.register_forward_hook(record) for m in model.modules() if hasattr(m, "drop_prob")]
    yield draws
    for hook in hooks:
        hook.remove()


@contextmanager
def ours_draw(draws: list[Draw]) -> Iterator[None]:
    """Let our networks take these draws instead of their own."""

    def given(rates: Sequence[float], tokens: Tensor) -> list[Kept]:
        branches = iter(draws)
        kept = [take(next(branches), rate) if rate else ALL for rate in rates]
        assert next(branches, None) is None
        return kept

    def take(draw: Draw, rate: float) -> Kept:
        assert draw[0] == pytest.approx(rate, rel=1e-6)
        return Kept(draw[1], 1.0 / (1.0 - rate))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(our_volo, "draw_kept", given)
        patch.setattr(our_lvvit, "draw_kept", given)
        yield


@contextmanager
def recorded_draws_of_ours() -> Iterator[list[Draw]]:
    """List what a network of ours draws, branch by branch."""
    draws: list[Draw] = []

    def record(rates: Sequence[float], tokens: Tensor) -> list[Kept]:
        kept = draw_kept(rates, tokens)
        everyone = torch.arange(len(tokens))
        draws.extend(
            (rate, everyone if branch.rows is None else branch.rows)
            for rate, branch in zip(rates, kept, strict=True)
            if rate
        )
        return kept

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(our_volo, "draw_kept", record)
        patch.setattr(our_lvvit, "draw_kept", record)
        yield draws


@contextmanager
def the_published_draw(published: Published, draws: list[Draw]) -> Iterator[None]:
    """Let published networks take these draws instead of their own."""
    branches = iter(draws)

    def given(module: Any, branch: Tensor) -> Tensor:
        rate, rows = next(branches)
        assert module.drop_prob == pytest.approx(rate, rel=1e-6)
        keeps = torch.zeros(len(branch), *[1] * (branch.ndim - 1)).index_fill(0, rows, 1.0)
        return branch * keeps / (1.0 - module.drop_prob)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published.volo.DropPath, "forward", given)
        yield
    assert next(branches, None) is None
