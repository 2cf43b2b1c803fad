"""Training steps on a device: the host never waits between log points; compiled blocks give the same losses.

On a GPU torch reports every synchronisation. On the CPU operations that would synchronise on a GPU raise an
error instead, so that a mistake is found without a GPU.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from horovod_volo.cluster.collectives import Collectives
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.update_settings import Exchange
from horovod_volo.core.errors import UserError
from horovod_volo.data.loader import PendingTrainBatch
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.step import train_step
from tests.gpu.conftest import losses
from tests.gpu.synchronisation import RefuseSynchronisation

OpenContext = Callable[..., TrainContext]

WARM_UP_STEPS, CHECKED_STEPS = 3, 3


@contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """Make every synchronisation with the device an error inside this context."""
    if device.type == "cpu":
        with RefuseSynchronisation():
            yield
        return
    try:
        with warnings.catch_warnings(action="ignore"):  # that this mode does not find all of them
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


OF_VOLO = {"drop_path": 0.1, "clip_grad": 1.0, "ema_decay": 0.99, "accumulation": 2}


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp32", **OF_VOLO},
        {"precision": "bf16", **OF_VOLO},
        {"precision": "fp16", **OF_VOLO},
        {"opt": "lamb"},
        {"opt": "lars"},
        {"opt": "muon", "clip_grad": 1.0},
        {"opt": "sgd"},
        {"shard_optimizer": True, "clip_grad": 1.0, "precision": "fp16"},
        {"clip_grad": 0.1, "clip_mode": "agc"},
        {"clip_grad": 0.1, "clip_mode": "value"},
        {"grad_checkpoint": True, "layer_decay": 0.9},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_training_step_does_not_synchronise(open_context, device, settings):
    """Train a few steps; in the last ones a synchronisation is an error."""
    context = open_context(**{"precision": "bf16", **settings})
    batches = context.learner.train_loader.batches(0, 0)
    for _ in range(WARM_UP_STEPS):
        train_step(context, batches)
    with no_synchronisation(device):
        for _ in range(CHECKED_STEPS):
            train_step(context, batches)
    meter, accumulation = context.progress.meter, context.config.update.accumulation
    assert meter.micro_batches == accumulation * (WARM_UP_STEPS + CHECKED_STEPS)
    assert all(value > 0 for value in meter.sums().values())


def test_the_next_batch_is_prepared_before_the_exchange_ends(open_context: OpenContext) -> None:
    """The transform of each batch but the first runs between backward and the update of the step before."""
    context = open_context(accumulation=2)
    parameters = list(context.state.model.parameters())
    transform = context.learner.train_loader._prefetcher._transform
    found: list[tuple[int, bool]] = []

    def observed(pending: PendingTrainBatch, decoded: Any) -> torch.Tensor:
        found.append((context.state.step, all(parameter.grad is not None for parameter in parameters)))
        return transform(pending, decoded)

    context.learner.train_loader._prefetcher._transform = observed
    batches = context.learner.train_loader.batches(0, 0)
    for _ in range(3):
        train_step(context, batches)
    # Two batches of each step: the first was prepared at the end of the step before, after backward.
    assert found == [(0, False), (0, True), (0, True), (1, True), (1, True), (2, True), (2, True)]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_fp16_compression_does_not_synchronise(device, micro_batches, monkeypatch):
    """The scale factors of the next step are computed from this step's maxima on the device."""
    # CPU tensors have another code path; this forces that of the GPU on a CPU, too.
    monkeypatch.setattr("horovod_volo.cluster.compression.on_cpu", lambda _: False)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).to(device)
    world = World(size=2, collectives=Collectives())  # its sums over ranks are the values of one rank
    settings = Exchange(compression="fp16", bucket_mib=0.01)
    reducer = Reducer(model, world, settings, micro_batches=micro_batches)
    reducer.statistics.skip_on_device()  # as a run with AdamW does; otherwise the host looks at each step
    images = torch.randn(16, 64, device=device)

    def step() -> None:
        for _ in range(micro_batches):
            (model(images).square().mean() / micro_batches).backward()
        with reducer.synchronized_gradients():
            pass

    for _ in range(WARM_UP_STEPS):
        step()
    before = reducer.scales.running_maxima.clone()
    with no_synchronisation(device):
        for _ in range(CHECKED_STEPS):
            step()
    assert (before > 0).all()
    assert reducer.scales.running_maxima.isfinite().all()


@pytest.mark.parametrize(
    "synchronise",
    [
        lambda ones: ones.sum().item(),
        lambda ones: float(ones[0]),
        lambda ones: ones[ones > 0],
        lambda ones: ones.nonzero(),
        lambda ones: bool(ones.any()),
    ],
)
def test_synchronisation_is_detected(synchronise, device):
    ones = torch.ones(3, device=device)
    with pytest.raises(RuntimeError), no_synchronisation(device):
        synchronise(ones)


STEPS = 3


def storages(context: TrainContext) -> set[int]:
    gradients = [parameter.grad for parameter in context.state.model.parameters()]
    return {gradient.untyped_storage().data_ptr() for gradient in gradients if gradient is not None}


def test_losses_with_compiled_blocks_are_the_same(open_context: OpenContext, device: torch.device) -> None:
    settings = {"img_size": 32, "drop_path": 0.0}
    expected = losses(open_context(**settings), STEPS)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    context = open_context(compile=True, **settings)
    used: set[int] = set()
    context.state.optimizer.register_step_pre_hook(lambda *_: used.update(storages(context)))
    found = losses(context, STEPS)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 1
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-4
    assert used == {bucket.gradients.untyped_storage().data_ptr() for bucket in context.state.reducer.buckets}


def test_without_a_compiler_compile_is_an_error_and_nothing_is_written(open_context, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="--compile needs a C\\+\\+ compiler"):
        open_context(compile=True)
    assert not list(tmp_path.iterdir())
