"""The networks against the published ones, from the same weights: logits, losses, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from horovod_volo.config.schema import Objective
from horovod_volo.models.build import build_model
from horovod_volo.models.lvvit import LvVit
from horovod_volo.objective.loss import build_loss
from tests.published.checkouts import Published, named_folder
from tests.published.conftest import Compare
from tests.published.examples import BOX, CLASSES, SIDE, labels_of, published_target
from tests.unit.network_samples import perturbed, random_images

named_folder()  # or this module is skipped

NAMES = [f"volo_d{size}" for size in range(1, 6)] + [f"lvvit_{size}" for size in "tsml"]
LARGE = ("volo_d4", "volo_d5", "lvvit_l")
WITH_GRADIENTS = ("volo_d1", "volo_d2", "lvvit_t", "lvvit_s")
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


@dataclass(frozen=True)
class Pair:
    """A network of ours and the published one with its weights."""

    name: str
    ours: Any
    theirs: Any

    @property
    def images(self) -> Tensor:
        """Return a batch."""
        return random_images(self.batch, 224)

    @property
    def batch(self) -> int:
        """Return the size of a batch: small where the network is large."""
        return 2 if self.name in LARGE else 4


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, published: Published) -> Pair:
    """Return each network beside the published one."""
    torch.manual_seed(0)
    ours = perturbed(build_model(request.param, img_size=224, num_classes=CLASSES, drop_path=0.0))
    theirs = published.network(request.param)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return Pair(request.param, ours, theirs)


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


@pytest.mark.parametrize("name", ["volo_d1", "lvvit_t"])
def test_rates_of_stochastic_depth(name: str, published: Published) -> None:
    ours = build_model(name, img_size=224, num_classes=CLASSES, drop_path=0.3)
    theirs = published.network(name, drop_path=0.3)
    assert drop_rates(ours) == pytest.approx(drop_rates(theirs), rel=1e-6)
    assert len(drop_rates(ours)) == {"volo_d1": 14, "lvvit_t": 11}[name]


def drop_rates(model: torch.nn.Module) -> list[float]:
    """Return the rate of each block that has one, from the first to the last."""
    rates = []
    if isinstance(model, LvVit):
        return [rate for rate in model.rates if rate]
    for block in model.modules():
        # timm has a module for each of a block's two branches, always with the same rate.
        drop = getattr(block, "drop_path", getattr(block, "drop_path1", None))
        rate = getattr(drop, "drop_prob", getattr(drop, "rate", 0.0))
        rates += [rate] if rate else []
    return rates


@torch.inference_mode()
def test_evaluation(pair: Pair, compare: Compare) -> None:
    images = pair.images
    compare(f"{pair.name}, evaluation", pair.ours.eval()(images), pair.theirs.eval()(images))


@torch.inference_mode()
def test_training_logits(pair: Pair, published: Published, compare: Compare) -> None:
    images = pair.images
    class_logits, token_logits = pair.ours.train().training_logits(images, BOX.exchange)
    with published.given_box(pair.name, BOX):
        of_class, of_tokens, corners = pair.theirs.train()(images)
    assert corners == (3, 5, 10, 9)
    compare(f"{pair.name}, class logits in training", class_logits, of_class)
    compare(f"{pair.name}, token logits in training", token_logits, of_tokens)
    own, other = pair.ours.state_dict(), pair.theirs.state_dict()  # batch norm has moved its averages
    for name in own:
        assert torch.allclose(own[name], other[name], rtol=1e-5, atol=1e-6), name


def test_from_images_to_the_loss(pair: Pair, published: Published, compare: Compare) -> None:
    """Take each repository's own command: VOLO with the true class mixed in, LV-ViT without."""
    labels, images = labels_of(pair.batch, seed=3), pair.images
    truth, token_weight = (False, 1.0) if pair.name.startswith("lvvit") else (True, 0.5)
    settings = Objective(
        token_label=True,
        token_label_data="maps",
        label_geometry="reference",
        ground_truth=truth,
        dense_weight=token_weight,
    )
    target = published_target(published, pair.batch, seed=3)
    if truth:
        published_loss = published.volo_losses.TokenLabelGTCrossEntropy(dense_weight=token_weight)
    else:
        published_loss = published.lvvit_losses.TokenLabelCrossEntropy(dense_weight=token_weight)

    learning = pair.name in WITH_GRADIENTS
    with torch.set_grad_enabled(learning):
        logits = pair.ours.train().training_logits(images, BOX.exchange)
        ours = build_loss(settings, CLASSES, SIDE)(*logits, labels, BOX).total
        with published.given_box(pair.name, BOX):
            theirs = published_loss(pair.theirs.train()(images), target)
    compare(f"{pair.name}, loss from images", ours, theirs)
    if learning:
        ours.backward()
        theirs.backward()
        own, other = gradients(pair.ours), gradients(pair.theirs)
        apart = (own - other).norm() / other.norm()
        compare(f"{pair.name}, gradients' relative distance", apart, torch.zeros(()))


def gradients(model: torch.nn.Module) -> Tensor:
    """Return all gradients in one vector, parameters in the order of their names."""
    named = sorted(model.named_parameters(), key=lambda item: item[0])
    return torch.cat([parameter.grad.flatten() for _, parameter in named])
