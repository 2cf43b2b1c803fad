"""The update (clipping, AdamW, weight averaging) against timm's and against memory bandwidth.

Gradients are written before every step, as backward would, which is not timed. Our time includes zeroing
them; timm's backward allocates them, which is not counted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from horovod_volo.bench.cli import Model, Pairs
from horovod_volo.bench.comparison import (
    Action,
    Block,
    alternate,
    assert_agree,
    block_with_setup,
    default_device,
)
from horovod_volo.bench.machine.peers_timm import TimmUpdate
from horovod_volo.bench.results import Figure, Result
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Exchange
from horovod_volo.models.build import build_model, exempt_from_decay
from horovod_volo.optim.build import build_optimizer, parameter_groups, set_lr
from horovod_volo.optim.clip import build_clip, divide
from horovod_volo.optim.ema import Ema

CLASSES = 1000
LR, WEIGHT_DECAY, MAX_NORM = 1e-3, 0.05, 1.0
EMA = 0.9  # decay of the average: so small that the compared steps change it measurably
BYTES = 50  # per parameter: reading and writing it, its gradient, moments and average once
_COPIED_BYTES = 8  # per parameter: a copy reads and writes four bytes
_COMPARED_STEPS = 20
_TOLERANCE = 1e-6
PEERS = {
    name: partial(TimmUpdate, lr=LR, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM, ema=EMA, fastest=fastest)
    for name, fastest in (("timm's defaults", False), ("timm's best", True))
}


class OurUpdate:
    """The part of the engine's step after the all-reduce."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self._reducer = Reducer(model, World.single(), Exchange(compression="none"), micro_batches=1)
        exempt = exempt_from_decay(model)
        groups = parameter_groups(
            named, named, exempt=exempt, weight_decay=WEIGHT_DECAY, layers={}, layer_decay=1.0
        )
        self._optimizer = build_optimizer("adamw", groups, momentum=0.0)
        set_lr(self._optimizer, LR)
        self._clip = build_clip(
            "norm",
            MAX_NORM,
            named,
            flat_gradients=self._reducer.local_gradients,
            heads=(),
            global_grad_norm=self._reducer.global_grad_norm,
        )
        self._average = Ema(model, self._reducer.buckets, EMA)

    def __call__(self) -> None:
        """Take one step."""
        with self._reducer.synchronized_gradients():
            divide(self._optimizer, self._clip())
            self._optimizer.step()
        self._average.update(step=0)  # without warm-up all steps are alike

    def averages(self) -> Iterable[Tensor]:
        """Return the averaged weights."""
        return self._average.models()["ema"].parameters()


def measure(*, model: Model = "volo_d1", pairs: Pairs = 7) -> Result:
    """Compare the updates of a model's parameters."""
    torch.manual_seed(0)
    network = build_model(model, img_size=224, num_classes=CLASSES, drop_path=0.0).to(default_device())
    figures = [figure for name in PEERS for figure in _compare(name, network, pairs)]
    figures += _compare_with_copy(network, pairs)
    return Result(f"optimizer {model}", "clip, AdamW and averaged weights, fp32, against timm's", figures)


def _compare(name: str, network: nn.Module, pairs: int) -> list[Figure]:
    our_model, peer_model = copy.deepcopy(network), copy.deepcopy(network)
    ours, peer = OurUpdate(our_model), PEERS[name](peer_model)
    random = torch.Generator().manual_seed(1)
    for step in range(_COMPARED_STEPS):
        # Small and large in turn: AdamW's result does not depend on a constant clip factor.
        size = (1e-4, 1e-2)[step % 2]
        gradients = [size * torch.randn(p.shape, generator=random) for p in our_model.parameters()]
        for model, update in ((our_model, ours), (peer_model, peer)):
            _set_gradients(model, gradients)
            update()
    for what, our_values, peer_values in (
        ("weights", our_model.parameters(), peer_model.parameters()),
        ("averages", ours.averages(), peer.averages()),
    ):
        what = f"{what} after {_COMPARED_STEPS} steps, {name}"
        assert_agree(what, _flat(our_values), _flat(peer_values), _TOLERANCE)
    found = alternate(_block(ours, our_model), _block(peer, peer_model), pairs)
    return [
        Figure.of_seconds(name, found.peer),
        Figure.of_estimate(f"faster than {name}", found.times_faster, "x"),
    ]


def _compare_with_copy(network: nn.Module, pairs: int) -> list[Figure]:
    model = copy.deepcopy(network)
    update = OurUpdate(model)
    source = _flat(model.parameters())
    target = torch.empty_like(source)
    update()
    found = alternate(_block(update, model), _block(partial(target.copy_, source), network), pairs)
    gigabytes = 1e-9 * _COPIED_BYTES * source.numel()
    ratios = [
        ours / (copying * BYTES / _COPIED_BYTES) for ours, copying in zip(found.ours, found.peer, strict=True)
    ]
    return [
        Figure.of_seconds("update", found.ours),
        Figure.of("copy", [gigabytes / seconds for seconds in found.peer], "GB/s"),
        Figure.of(f"update beside {BYTES} bytes a parameter at that speed", ratios, "x"),
    ]


def _block(action: Action, model: nn.Module) -> Block:
    """Make a timed block of calls, each with new gradients."""
    gradients = [torch.full_like(parameter, 1e-3) for parameter in model.parameters()]
    device = gradients[0].device
    return block_with_setup(lambda: _set_gradients(model, gradients), lambda _: action(), device)


def _set_gradients(model: nn.Module, gradients: list[Tensor]) -> None:
    """Give every parameter a gradient by the same path as backward, so that hooks run."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = None
    torch.autograd.backward(parameters, gradients)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
