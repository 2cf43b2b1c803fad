"""The classifier that --fit-head fits is the optimum, on any number of ranks."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.core.errors import UserError
from horovod_volo.engine.head_fit import LogisticRegression
from horovod_volo.models.build import linear_head
from tests.ranks.launching import alone, on_ranks

IMAGES, FEATURES, CLASSES = 301, 12, 5


def columns() -> list[Tensor]:
    """Return features, one of them constant, classes and numbers of images."""
    random = torch.Generator().manual_seed(0)
    features = 3 + torch.randn(IMAGES, FEATURES, generator=random) * torch.logspace(-1, 1, FEATURES)
    labels = (features[:, 5:10] + torch.randn(IMAGES, CLASSES, generator=random)).argmax(1)
    features[:, 0] = 2.0
    return [features, labels, torch.arange(IMAGES)]


def fitted(world: World) -> dict[str, Any]:
    """Fit a classifier to this rank's part: ranks have 151 and 150 images, those of three another number."""
    own = [column[world.rank :: world.size] for column in columns()]
    regression = LogisticRegression(own, CLASSES, world, lambda: None)
    return {"strength": regression.fit(), "point": regression.point}


def penalized_loss(point: Tensor, strength: float) -> Tensor:
    """Return what the fit minimises, computed without it."""
    features, labels, _ = columns()
    deviations = features.double().std(0, correction=0)
    scale = deviations.clamp(min=deviations.max() / 1000)
    logits = features.double() @ point[:, :-1].T + point[:, -1]
    penalty = strength / 2 * (point[:, :-1] * scale).square().sum()
    return F.cross_entropy(logits, labels) + penalty


def test_the_head_is_the_optimum_on_any_number_of_ranks(tmp_path):
    one = alone(fitted)
    (two,) = on_ranks(tmp_path, fitted)
    for found in two:
        assert found["strength"] == one["strength"]
        assert torch.allclose(found["point"], one["point"], rtol=1e-5, atol=1e-6)
    assert torch.equal(two[0]["point"], two[1]["point"])
    gradient = torch.func.grad(penalized_loss)(one["point"], one["strength"])
    assert gradient.norm() < 1e-4 * torch.func.grad(penalized_loss)(0 * one["point"], 0.0).norm()
    assert one["strength"] < 1


def test_a_network_without_one_linear_classifier_is_refused() -> None:
    for other in (nn.Sequential(nn.Conv2d(3, 4, 1)), nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))):
        with pytest.raises(UserError, match="--fit-head is for networks with one linear classifier"):
            linear_head(other, ["0", "1"])
