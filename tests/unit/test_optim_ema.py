"""Averaged weights against timm's and against their definition, after each step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import horovod_volo.models.timm_api  # noqa: F401  # torchvision imports only after it

# isort: split
from timm.utils import ModelEmaV2

from horovod_volo.cluster.buckets import Bucket, build_gradient_buckets
from horovod_volo.config.update_settings import Exchange
from horovod_volo.optim.ema import Ema


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def buckets_of(model: nn.Module) -> list[Bucket]:
    settings = Exchange(bucket_mib=40 / 2**20, last_bucket_mib=40 / 2**20)
    return build_gradient_buckets(dict(model.named_parameters()), settings)


def train_a_little(model: nn.Module, step: int) -> None:
    random = torch.Generator().manual_seed(step)
    model(torch.randn(8, 3, generator=random))  # updates the statistics of batch norm
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random))


@pytest.mark.parametrize("decay", [0.5, 0.99992])
def test_averages_equal_timms(decay: float) -> None:
    """Statistics of batch norm are averaged too; its counts are copied, as by timm's ModelEmaV3."""
    model = network()
    average, theirs = Ema(model, buckets_of(model), decay), ModelEmaV2(model, decay=decay)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for step in range(50):
        train_a_little(model, step)
        average.update(step)
        theirs.update(model)
    expected = theirs.module.state_dict()
    assert average.tensors().keys() == expected.keys()
    for name, found in average.tensors().items():
        if name.endswith("num_batches_tracked"):
            assert int(found) == 50
        else:
            torch.testing.assert_close(found, expected[name], rtol=1e-6, atol=1e-6)
            assert not torch.equal(found, initial[name]), name
            assert not torch.equal(found, model.state_dict()[name]), name


@pytest.mark.parametrize("decay", [0.5, 0.9999])
def test_warmed_up_updates_follow_the_definition(decay: float) -> None:
    model = network()
    average = Ema(model, buckets_of(model), decay, warmup=True)
    expected = [parameter.detach().double() for parameter in model.parameters()]
    for step in range(30):
        train_a_little(model, step)
        average.update(step)
        decay_now = min(decay, (1 + step) / (10 + step))
        expected = [
            decay_now * old + (1 - decay_now) * new.detach()
            for old, new in zip(expected, model.parameters(), strict=True)
        ]
    for found, expected_average in zip(average.models()["ema"].parameters(), expected, strict=True):
        torch.testing.assert_close(found.double(), expected_average, rtol=1e-5, atol=1e-5)


def test_averages_have_as_few_storages_as_the_weights() -> None:
    model = network()
    buckets = buckets_of(model)
    average = Ema(model, buckets, 0.9)
    storages = {p.untyped_storage().data_ptr() for p in average.models()["ema"].parameters()}
    assert len(storages) == len(buckets) > 1
    for name, parameter in average.models()["ema"].named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_tensors_that_a_checkpoint_restores_are_those_in_use() -> None:
    """Values written into tensors() are evaluated and updated from then on."""
    model = network()
    average = Ema(model, buckets_of(model), 0.5)
    with torch.no_grad():
        for tensor in average.tensors().values():
            tensor.fill_(7)
    evaluated: list[Tensor] = [*average.models()["ema"].parameters(), *average.models()["ema"].buffers()]
    assert all((tensor == 7).all() for tensor in evaluated)
    average.update(step=10**6)
    weight = average.tensors()["0.weight"]
    torch.testing.assert_close(weight, (model.state_dict()["0.weight"] + 7) / 2)
