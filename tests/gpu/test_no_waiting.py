"""Between log points the host never waits for the device: it queues step after step.

On a GPU torch itself reports every wait. On the CPU, where nothing is waited for, the operations
that would wait on a GPU are refused instead, so that a mistake is found without one.
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

# Their results are numbers or shapes that the host must know before it can go on.
WAITING = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2"}
WARM_UP_STEPS, WATCHED_STEPS = 3, 3


class NothingThatWaits(TorchDispatchMode):
    """Inside, an operation that would wait for a GPU is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in WAITING or by_mask:
            raise RuntimeError(f"{func} would wait for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing_waits(device: torch.device) -> Iterator[None]:
    """Make waiting for the device an error."""
    if device.type == "cpu":
        with NothingThatWaits():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_training_step_does_not_wait(
    open_context: OpenContext, device: torch.device, precision: str
) -> None:
    take_steps(
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
def test_no_other_update_waits(
    open_context: OpenContext, device: torch.device, settings: dict[str, Any]
) -> None:
    take_steps(open_context(**{"precision": "bf16", **settings}), device)


@pytest.mark.parametrize("passes", [1, 2])
def test_fp16_compression_does_not_wait(
    device: torch.device, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The factors of the next step follow from this one's maxima on the device alone."""
    # On a CPU it costs nothing to ask for a maximum; here the lines for a GPU are watched there too.
    monkeypatch.setattr("horovod_volo.cluster.compression._on_host", lambda _: False)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)).to(device)
    world = World(size=2, ring=LocalCollectives())  # what it sums stays as it is
    settings = Exchange(compression="fp16", bucket_mib=0.01)
    reducer = Reducer(model, world, settings, passes=passes)
    images = torch.randn(16, 64, device=device)

    def step() -> None:
        for _ in range(passes):
            (model(images).square().mean() / passes).backward()
        with reducer.synchronized_gradients():
            pass

    for _ in range(WARM_UP_STEPS):
        step()
    before = reducer.factors.running.clone()
    with nothing_waits(device):
        for _ in range(WATCHED_STEPS):
            step()
    assert (before > 0).all()
    assert reducer.factors.running.isfinite().all()


def take_steps(context: TrainContext, device: torch.device) -> None:
    """Take a few steps, the later ones under watch."""
    passes = context.train_loader.batches(0, 0)
    for _ in range(WARM_UP_STEPS):
        train_step(context, passes)
    with nothing_waits(device):
        for _ in range(WATCHED_STEPS):
            train_step(context, passes)
    assert context.window.passes == context.config.update.accumulation * (WARM_UP_STEPS + WATCHED_STEPS)
    assert all(value > 0 for value in context.window.sums().values())


@pytest.mark.parametrize(
    "wait",
    [
        lambda ones: ones.sum().item(),
        lambda ones: float(ones[0]),
        lambda ones: ones[ones > 0],
        lambda ones: ones.nonzero(),
        lambda ones: bool(ones.any()),
    ],
)
def test_waiting_would_be_noticed(wait: Callable[[torch.Tensor], object], device: torch.device) -> None:
    ones = torch.ones(3, device=device)
    with pytest.raises(RuntimeError), nothing_waits(device):
        wait(ones)
