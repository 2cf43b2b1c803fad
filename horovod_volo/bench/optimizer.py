"""The update after the exchange, clip, AdamW and averaged weights, against timm's and the memory's speed.

Gradients are written anew before every step, outside the measured time, as backward would. Ours includes
that they are zeroed; timm's backward allocates them anew, and that is not counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter

import torch
from torch import Tensor, nn

from horovod_volo.bench.agreement import assert_agree
from horovod_volo.bench.pairs import Action, Block, alternate, repeats_for, wait_for
from horovod_volo.bench.peers_optimizer import TimmUpdate, at_its_best, by_default
from horovod_volo.bench.results import Figure, Result
from horovod_volo.cluster.reducer import Reducer
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Exchange
from horovod_volo.models.build import build_model, exempt_from_decay
from horovod_volo.optim.build import build_optimizer
from horovod_volo.optim.clip import build_clip, divide
from horovod_volo.optim.ema import Ema
from horovod_volo.optim.groups import parameter_groups, set_lr

CLASSES = 1000
RATE, DECAY, BOUND = 1e-3, 0.05, 1.0
KEPT = 0.9  # of the average at each step: so little that the compared steps show in it
BYTES = 50  # a parameter: what reading and writing it, its gradient, moments and average once would take
_COPIED_BYTES = 8  # a parameter that is copied
_COMPARED_STEPS = 20
_TOLERANCE = 1e-6
_MILLISECONDS, _GIGABYTES = 1e3, 1e-9

Peer = Callable[..., TimmUpdate]


class OurUpdate:
    """What the engine's step does once gradients are there."""

    def __init__(self, model: nn.Module) -> None:
        named = dict(model.named_parameters())
        self._reducer = Reducer(model, World.single(), Exchange(compression="none"), micro_batches=1)
        groups = parameter_groups(
            named, named, exempt=exempt_from_decay(model), weight_decay=DECAY, layers={}, layer_decay=1.0
        )
        self._optimizer = build_optimizer("adamw", groups, momentum=0.0)
        set_lr(self._optimizer, RATE)
        self._clip = build_clip(
            "norm",
            BOUND,
            named,
            flat_gradients=self._reducer.local_gradients,
            heads=(),
            global_grad_norm=self._reducer.global_grad_norm,
        )
        self._average = Ema(model, self._reducer.buckets, KEPT)

    def __call__(self) -> None:
        """Take one step."""
        with self._reducer.synchronized_gradients():
            divide(self._optimizer, self._clip())
            self._optimizer.step()
        self._average.update(step=0)  # without warm-up all steps are alike

    def averages(self) -> Iterable[Tensor]:
        """Return the averaged weights."""
        return self._average.models()["ema"].parameters()


def measure(*, model: str, pairs: int) -> Result:
    """Compare the updates of a model's parameters."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    network = build_model(model, img_size=224, num_classes=CLASSES, drop_path=0.0).to(device)
    figures = [
        *_against("timm's defaults", by_default, network, pairs),
        *_against("timm's best", at_its_best, network, pairs),
        *_against_memory(network, pairs),
    ]
    return Result(f"optimizer {model}", "clip, AdamW and averaged weights, fp32, against timm's", figures)


def _against(name: str, peer: Peer, network: nn.Module, pairs: int) -> list[Figure]:
    our_model, peer_model = copy.deepcopy(network), copy.deepcopy(network)
    ours = OurUpdate(our_model)
    theirs = peer(peer_model, rate=RATE, decay=DECAY, bound=BOUND, kept=KEPT)
    _assert_same(name, (our_model, ours), (peer_model, theirs))
    result = alternate(_block(ours, our_model), _block(theirs, peer_model), pairs)
    return [
        Figure.of(name, [_MILLISECONDS * seconds for seconds in result.peer], "ms"),
        Figure.of_estimate(f"faster than {name}", result.times_faster, "x"),
    ]


def _assert_same(name: str, ours: tuple[nn.Module, OurUpdate], theirs: tuple[nn.Module, TimmUpdate]) -> None:
    random = torch.Generator().manual_seed(1)
    for step in range(_COMPARED_STEPS):
        # Small and large in turn: AdamW would not show a bound that always divides by the same.
        size = (1e-4, 1e-2)[step % 2]
        gradients = [size * torch.randn(p.shape, generator=random) for p in ours[0].parameters()]
        for model, update in (ours, theirs):
            _fill(model, gradients)
            update()
    our_weights, peer_weights = (_flat(model.parameters()) for model, _ in (ours, theirs))
    our_averages, peer_averages = (_flat(update.averages()) for _, update in (ours, theirs))
    assert_agree(f"weights after {_COMPARED_STEPS} steps, {name}", our_weights, peer_weights, _TOLERANCE)
    assert_agree(f"averages after {_COMPARED_STEPS} steps, {name}", our_averages, peer_averages, _TOLERANCE)


def _against_memory(network: nn.Module, pairs: int) -> list[Figure]:
    model = copy.deepcopy(network)
    update = OurUpdate(model)
    source = _flat(model.parameters())
    target = torch.empty_like(source)
    update()
    result = alternate(_block(update, model), _block(partial(target.copy_, source), network), pairs)
    bandwidths = [_COPIED_BYTES * source.numel() / seconds for seconds in result.peer]
    shares = [
        ours / (copying * BYTES / _COPIED_BYTES)
        for ours, copying in zip(result.ours, result.peer, strict=True)
    ]
    return [
        Figure.of("update", [_MILLISECONDS * seconds for seconds in result.ours], "ms"),
        Figure.of("copy", [_GIGABYTES * rate for rate in bandwidths], "GB/s"),
        Figure.of(f"update beside {BYTES} bytes a parameter at that speed", shares, "x"),
    ]


def _block(action: Action, model: nn.Module) -> Block:
    """Make a block of calls, each with fresh gradients, of which only the calls are timed."""
    device = next(model.parameters()).device
    repeats = repeats_for(action, device)
    gradients = [torch.full_like(parameter, 1e-3) for parameter in model.parameters()]

    def block() -> float:
        seconds = 0.0
        for _ in range(repeats):
            _fill(model, gradients)
            wait_for(device)
            began = perf_counter()
            action()
            wait_for(device)
            seconds += perf_counter() - began
        return seconds / repeats

    return block


def _fill(model: nn.Module, gradients: list[Tensor]) -> None:
    """Give every parameter a gradient as backward does."""
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = None
    torch.autograd.backward(parameters, gradients)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
