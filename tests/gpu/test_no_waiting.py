"""Between log points the host never synchronises with the device: it queues step after step.

On a GPU torch reports every synchronisation. On the CPU the operations that would synchronise on a GPU are
refused instead, so that a mistake is found without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from horovod_volo.cluster.collectives import LocalCollectives
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Exchange
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.step import train_step

OpenContext = Callable[..., TrainContext]

# Operations whose results are numbers or shapes that the host needs.
SYNCHRONISING = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2"}
WARM_UP_STEPS, CHECKED_STEPS = 3, 3


class RefuseSynchronisation(TorchDispatchMode):
    """Raises RuntimeError at an operation that would synchronise with a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in SYNCHRONISING or by_mask:
            raise RuntimeError(f"{func} would synchronise with the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_synchronisation(device: torch.device) -> Iterator[None]:
    """Make every synchronisation with the device an error inside this context."""
    if device.type == "cpu":
        with RefuseSynchronisation():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_training_step_does_not_synchronise(
    open_context: OpenContext, device: torch.device, precision: str
) -> None:
    assert_steps_do_not_synchronise(
        open_context(precision=precision, drop_path=0.1, clip_grad=1.0, ema_decay=0.99, accumulation=2),
        device,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"opt": "lamb"},
        {"opt": "lars"},
        {"opt": "sgd"},
        {"shard_optimizer": True, "clip_grad": 1.0, "precision": "fp16"},
        {"clip_grad": 0.1, "clip_mode": "agc"},
        {"clip_grad": 0.1, "clip_mode": "value"},
        {"grad_checkpoint": True, "layer_decay": 0.9},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_no_other_update_synchronises(
    open_context: OpenContext, device: torch.device, settings: dict[str, Any]
) -> None:
    assert_steps_do_not_synchronise(open_context(**{"precision": "bf16", **settings}), device)


@pytest.mark.parametrize("passes", [1, 2])
def test_fp16_compression_does_not_synchronise(
    device: torch.device, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scale factors of the next step are computed from this step's maxima on the device."""
    # CPU tensors take another code path: force the GPU's, so that it is checked on a CPU too.
    monkeypatch.setattr("horovod_volo.cluster.compression._on_cpu", lambda _: False)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).to(device)
    world = World(size=2, collectives=LocalCollectives())  # its sums over ranks are the rank's own values
    settings = Exchange(compression="fp16", bucket_mib=0.01)
    reducer = Reducer(model, world, settings, micro_batches=passes)
    images = torch.randn(16, 64, device=device)

    def step() -> None:
        for _ in range(passes):
            (model(images).square().mean() / passes).backward()
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


def assert_steps_do_not_synchronise(context: TrainContext, device: torch.device) -> None:
    """Train a few steps, the last ones with synchronisation refused."""
    batches = context.train_loader.batches(0, 0)
    for _ in range(WARM_UP_STEPS):
        train_step(context, batches)
    with no_synchronisation(device):
        for _ in range(CHECKED_STEPS):
            train_step(context, batches)
    assert context.meter.micro_batches == context.config.update.accumulation * (WARM_UP_STEPS + CHECKED_STEPS)
    assert all(value > 0 for value in context.meter.sums().values())


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
def test_synchronisation_is_detected(
    synchronise: Callable[[torch.Tensor], object], device: torch.device
) -> None:
    ones = torch.ones(3, device=device)
    with pytest.raises(RuntimeError), no_synchronisation(device):
        synchronise(ones)
