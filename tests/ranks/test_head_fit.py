"""The classifier that --fit-head fits: it is the optimum, on any number of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.core.errors import UserError
from horovod_volo.data.loader import EvalLoader
from horovod_volo.engine.classification_data import shared_catalog
from horovod_volo.engine.head_fit import fit_head, linear_head
from horovod_volo.engine.task import StoppedError
from tests.ranks.launching import alone, on_ranks

SIDE, IMAGES, CLASSES = 32, 61, 10  # 31 and 30 images of two ranks, whose last batches differ
POOLED = 3 * 4 * 4


def network() -> nn.Sequential:
    """Return a network whose features are coarse pixels, one of which is constant."""
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.ConstantPad1d((0, 1), 2.0))
    return nn.Sequential(pool, nn.Linear(POOLED + 1, CLASSES))


def fitted(world: World, *, images: Path, out: Path, stop: bool = False) -> dict[str, Any]:
    """Fit the classifier of the network and of its average; return it, and the features of rank 0."""
    torch.manual_seed(0)
    networks, data = [network(), network()], Data(eval_batch_size=15, image_decoder="pillow")
    catalog = shared_catalog(str(images), "train", out / "catalogs", world)
    common = {"device": torch.device("cpu"), "threads": 1, "image_size": SIDE, "crop_pct": 1.0}
    loader = EvalLoader(catalog, data, rank=world.rank, size=world.size, interpolation="bicubic", **common)
    stopped = stop and world.rank == 0
    try:
        said = fit_head(networks, ["1"], loader, len(catalog), world, lambda: stopped, lambda _: None)
    except StoppedError:
        return {"stopped": True}
    with torch.no_grad():
        rows = [(networks[0][0](batch.images), batch.classes, batch.indices) for batch in loader]
    loader.close()
    features, classes = torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])
    assert all(map(torch.equal, networks[0][1].parameters(), networks[1][1].parameters()))
    head = [parameter.detach() for parameter in networks[0][1].parameters()]
    return {"said": said, "head": head, "features": features, "classes": classes}


def reference(features: Tensor, classes: Tensor, strength: float) -> list[Tensor]:
    """Return the optimum, which Newton's method finds with the derivatives of autograd."""
    mean, scale = features.mean(0), features.std(0, correction=0).clamp(min=1e-6)
    inputs = F.pad((features - mean) / scale, (0, 1), value=1.0)

    def loss(point: Tensor) -> Tensor:
        weights = point.view(CLASSES, -1)
        penalty = strength / 2 * weights[:, :-1].square().sum()
        return F.cross_entropy(inputs @ weights.T, classes) + penalty

    point = torch.zeros(CLASSES * inputs.shape[1], dtype=torch.float64)
    for _ in range(30):
        gradient = torch.func.grad(loss)(point)
        hessian = torch.func.hessian(loss)(point)
        point = point - torch.linalg.lstsq(hessian, gradient[:, None], driver="gelsd").solution[:, 0]
    assert torch.func.grad(loss)(point).norm() < 1e-9
    weights = point.view(CLASSES, -1)
    return [weights[:, :-1] / scale, weights[:, -1] - weights[:, :-1] @ (mean / scale)]


def test_the_head_is_the_optimum_on_any_number_of_ranks(demo_images, tmp_path):
    call = partial(fitted, images=demo_images(IMAGES, 20), out=tmp_path)
    (by_rank, stopped) = on_ranks(tmp_path, call, partial(call, stop=True))
    one = alone(call)
    strength = float(one["said"].split()[-1])
    weight, bias = reference(one["features"].double(), one["classes"], strength)
    logits = one["features"].double() @ weight.T + bias
    for found in (one, *by_rank):
        assert found["said"].split()[-1] == one["said"].split()[-1]
        assert f"features of {IMAGES} images" in found["said"]
        own = one["features"].double() @ found["head"][0].double().T + found["head"][1].double()
        # A constant added to the logits of all classes changes nothing.
        assert torch.allclose(own.log_softmax(1), logits.log_softmax(1), atol=1e-4)
    assert [len(found["classes"]) for found in by_rank] == [31, 30]
    assert all(map(torch.equal, by_rank[0]["head"], by_rank[1]["head"]))
    assert torch.allclose(one["head"][0], by_rank[0]["head"][0], atol=1e-5)
    assert stopped == [{"stopped": True}] * 2


def test_a_network_has_one_linear_classifier() -> None:
    assert linear_head(network(), ["1", "aux_head"]).out_features == CLASSES
    for other in (nn.Sequential(nn.Conv2d(3, 4, 1)), nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))):
        with pytest.raises(UserError, match="--fit-head is for networks with one linear classifier"):
            linear_head(other, ["0", "1"])
