"""Learning rates, clipping, averaged weights and counts of skipped steps, against torch's and timm's."""

import random
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, PolynomialLR

import horovod_volo.models.timm_api  # noqa: F401  # before timm, which imports torchvision
from horovod_volo.cluster.buckets import Bucket, build_gradient_buckets
from horovod_volo.config.update_settings import Exchange, Update, milestones
from horovod_volo.optim.build import build_optimizer, set_lr
from horovod_volo.optim.clip import build_clip, divide
from horovod_volo.optim.ema import Ema
from horovod_volo.optim.loss_scale import SkippedSteps, overflows
from horovod_volo.optim.schedule import SCHEDULES, find_decay, lr_at

CosineLRScheduler = pytest.importorskip("timm.scheduler").CosineLRScheduler

COOLDOWN = 10
COSINE = SCHEDULES.find("cosine")
TRAINING: dict[str, Any] = {"peak": 1.6e-3, "start": 1e-6, "floor": 1e-5, "warmup": 20, "decay_steps": 300}
FINE_TUNING = {"peak": 8e-6, "start": 1e-6, "floor": 4e-6, "warmup": 5, "decay_steps": 30}
LVVIT = {"peak": 1.6e-3, "start": 1e-6, "floor": 1e-5, "warmup": 5, "decay_steps": 300}


def published_rates(
    peak: float, start: float, floor: float, warmup: int, decay_steps: int, *, prefix: bool = False
) -> list[float]:
    """Return the learning rate that timm's scheduler sets for each epoch."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = CosineLRScheduler(
        optimizer,
        t_initial=decay_steps,
        lr_min=floor,
        warmup_t=warmup,
        warmup_lr_init=start,
        warmup_prefix=prefix,
        cycle_limit=1,
    )
    rates = []
    for epoch in range(prefix * warmup + decay_steps + COOLDOWN):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step(epoch + 1)
    return rates


def in_steps(settings: dict[str, Any], steps: int) -> dict[str, Any]:
    """Return settings with the lengths in steps instead of epochs."""
    return settings | {name: settings[name] * steps for name in ("warmup", "decay_steps")}


@pytest.mark.parametrize("steps", [1, 1251])
@pytest.mark.parametrize("settings", [TRAINING, FINE_TUNING, LVVIT], ids=["training", "fine-tuning", "lvvit"])
def test_each_epoch_begins_at_the_published_learning_rate(settings: dict[str, float], steps: int) -> None:
    expected = published_rates(**settings)
    sizes = in_steps(settings, steps)
    rates = [lr_at(epoch * steps, decay=COSINE, **sizes) for epoch in range(len(expected))]
    assert len(expected) in (310, 40)
    assert rates == pytest.approx(expected, rel=1e-9, abs=0)
    assert expected[0] == settings["start"]
    assert expected[-COOLDOWN:] == [settings["floor"]] * COOLDOWN
    # At the end of the warm-up the cosine is already below its peak.
    assert max(expected) < settings["peak"]


def test_lr_per_epoch_keeps_the_learning_rate_during_each_epoch() -> None:
    steps = 7
    sizes = in_steps(FINE_TUNING, steps)
    rates = [lr_at(step, decay=COSINE, **sizes, stride=steps) for step in range(40 * steps)]
    expected = [rate for rate in published_rates(**FINE_TUNING) for _ in range(steps)]
    assert rates == pytest.approx(expected, rel=1e-9, abs=0)


def test_a_warm_up_before_the_cosine_equals_timms() -> None:
    expected = published_rates(**TRAINING, prefix=True)
    rates = [lr_at(epoch, decay=COSINE, **TRAINING, prefix=TRAINING["warmup"]) for epoch in range(330)]
    assert rates == pytest.approx(expected, rel=1e-9, abs=0)
    assert max(rates) == pytest.approx(TRAINING["peak"], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("linear", [0.0, 1.25, 1.7, 1.3, 0.9, 0.5, 0.5]),
        ("constant", [0.0, 1.25, 2.5, 2.5, 2.5, 0.5, 0.5]),
        ("half", [0.0, 1.25, 1.5, 1.5, 1.5, 0.5, 0.5]),
    ],
)
def test_other_decays(name: str, rates: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of warm-up are counted among five of decay; two of cool-down follow."""
    monkeypatch.setitem(SCHEDULES, "half", lambda _: 0.5)
    sizes = {"peak": 2.5, "start": 0.0, "floor": 0.5, "warmup": 2, "decay_steps": 5}
    assert [lr_at(step, decay=SCHEDULES.find(name), **sizes) for step in range(7)] == pytest.approx(rates)


STEPS = 40  # of the decay


def our_rates(settings: Update, *, floor: float) -> list[float]:
    sizes = {"peak": 0.5, "start": 0.0, "floor": floor, "warmup": 0, "decay_steps": STEPS}
    return [lr_at(step, decay=find_decay(settings), **sizes) for step in range(STEPS + 1)]


def rates_of(build: type[LRScheduler], **settings: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = build(optimizer, **settings)
    rates = []
    for _ in range(STEPS + 1):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("power", [0.9, 2.0])
def test_poly_is_torchs(power: float) -> None:
    expected = rates_of(PolynomialLR, total_iters=STEPS, power=power)
    assert our_rates(Update(sched="poly", poly_power=power), floor=0.0) == pytest.approx(expected, abs=1e-12)
    above_floor = [0.1 + 0.4 * rate / 0.5 for rate in expected]
    found = our_rates(Update(sched="poly", poly_power=power), floor=0.1)
    assert found == pytest.approx(above_floor, abs=1e-12)


def test_step_is_torchs_with_milestones_in_epochs() -> None:
    settings = Update(sched="step", epochs=20, decay_milestones="5, 15", decay_rate=0.3)
    expected = rates_of(MultiStepLR, milestones=[10, 30], gamma=0.3)  # two steps in an epoch
    assert our_rates(settings, floor=0.0)[:STEPS] == pytest.approx(expected[:STEPS])
    every = [round(20 * point, 9) for point in milestones(Update(epochs=20, decay_epochs=2.4))]
    assert every == [2.4, 4.8, 7.2, 9.6, 12.0, 14.4, 16.8, 19.2]


timm_utils = pytest.importorskip("timm.utils")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 5), nn.Linear(5, 2))
    with torch.no_grad():
        model[2].weight[1].zero_()  # a unit with norm 0
    return model


def with_gradients(scale: float) -> nn.Sequential:
    model, random = network(), torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=random)
    return model


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def clipped(mode: Literal["norm", "value", "agc"], bound: float, scale: float) -> list[Tensor]:
    model = with_gradients(scale)
    divisor = clip(model, mode, bound)
    assert (divisor is not None) == (mode == "norm" and bound > 0)
    plain_descent = torch.optim.SGD(model.parameters(), lr=1.0)
    divide(plain_descent, divisor)  # in place, because SGD's kernel has no divisor
    return gradients(model)


def clip(model: nn.Module, mode: Literal["norm", "value", "agc"], bound: float) -> Tensor | None:
    named, flat = dict(model.named_parameters()), gradients(model)
    return build_clip(
        mode, bound, named, flat_gradients=flat, heads=("3",), global_grad_norm=lambda norm: norm
    )()


@pytest.mark.parametrize("scale", [1e-6, 1.0, 100.0])
@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_gradients_are_clipped_as_by_torch_and_timm(mode, scale):
    expected = with_gradients(scale)
    if mode == "norm":
        nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
    elif mode == "value":
        nn.utils.clip_grad_value_(expected.parameters(), 0.5)
    else:
        timm_utils.adaptive_clip_grad(list(expected.parameters())[:-2], clip_factor=0.5)
    found = clipped(mode, 0.5, scale)
    changed = any(not torch.equal(a, b) for a, b in zip(found, gradients(with_gradients(scale)), strict=True))
    assert changed == (scale >= 1.0)
    for ours, theirs in zip(found, gradients(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@pytest.mark.parametrize("scale", [1e-6, 100.0])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lamb", "lars"])
def test_steps_equal_those_of_gradients_clipped_before(name: str, scale: float) -> None:
    """The weights do not depend on whether the optimizer's kernel divides, or a separate operation."""
    ours, theirs = with_gradients(scale), with_gradients(scale)
    start = [parameter.detach().clone() for parameter in ours.parameters()]
    optimizers = []
    for model in (ours, theirs):
        group = {"params": list(model.parameters()), "weight_decay": 0.1, "lr_scale": 1.0}
        optimizers.append(build_optimizer(name, [group], momentum=0.9))
        set_lr(optimizers[-1], 0.01)
    for _ in range(3):
        divide(optimizers[0], clip(ours, "norm", 0.5))
        optimizers[0].step()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizers[1].step()
    for found, expected, before in zip(ours.parameters(), theirs.parameters(), start, strict=True):
        assert not torch.equal(found, before)
        torch.testing.assert_close(found - before, expected - before, rtol=1e-4, atol=1e-7)


def with_batch_norm() -> nn.Sequential:
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
    model = with_batch_norm()
    average, theirs = Ema(model, buckets_of(model), decay), timm_utils.ModelEmaV2(model, decay=decay)
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
    model = with_batch_norm()
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
    model = with_batch_norm()
    buckets = buckets_of(model)
    average = Ema(model, buckets, 0.9)
    storages = {p.untyped_storage().data_ptr() for p in average.models()["ema"].parameters()}
    assert len(storages) == len(buckets) > 1
    for name, parameter in average.models()["ema"].named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def scaler_and_weight(interval: int) -> tuple[torch.amp.GradScaler, torch.nn.Parameter, torch.optim.SGD]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=interval)
    weight = torch.nn.Parameter(torch.ones(1))
    return scaler, weight, torch.optim.SGD([weight], lr=0.0)


@pytest.mark.parametrize("interval", [4, 7, 2000])
@pytest.mark.parametrize("steps_per_point", [1, 3])
def test_steps_that_overflow_are_counted(interval: int, steps_per_point: int) -> None:
    scaler, weight, optimizer = scaler_and_weight(interval)
    skipped = SkippedSteps(scaler)
    draw, expected = random.Random(interval), 0
    for step in range(1, 61):
        overflow = draw.random() < 0.15
        expected += overflow
        optimizer.zero_grad()
        scaler.scale(weight * (float("inf") if overflow else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % steps_per_point == 0:
            skipped.count(steps_per_point)
    assert skipped.total == expected


def test_a_state_that_was_replaced_is_no_overflow() -> None:
    scaler, _, _ = scaler_and_weight(2000)
    skipped = SkippedSteps(scaler)
    scaler.load_state_dict(scaler.state_dict() | {"scale": 4.0})
    skipped.restart()
    skipped.count(0)
    assert skipped.total == 0


def test_overflows_down_to_a_scale_of_zero_are_counted() -> None:
    """Of fp32: 2^16 is halved 166 times until it is 0."""
    before = scaler_and_weight(2000)[0].state_dict()
    assert [overflows(before, before | {"scale": 0.0}, steps) for steps in (165, 166, 400)] == [165, 166, 166]
