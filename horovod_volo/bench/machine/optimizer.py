"""The update (clipping, AdamW, weight averaging) against timm's and against memory bandwidth.

Gradients are written before every step, as backward would, which is not timed. Our time includes zeroing
them; timm's backward allocates them, which is not counted.
"""

from __future__ import annotations

import copy
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from horovod_volo.bench.cli import ModelName, Pairs
from horovod_volo.bench.comparison import Action, TimedBlock, alternate, assert_agree, block_with_setup
from horovod_volo.bench.machine.peers_timm import TimmUpdate
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import SyntheticRun, bench_config, flat_weights

LR, WEIGHT_DECAY, MAX_NORM = 1e-3, 0.05, 1.0
EMA = 0.9  # decay of the average: so small that the compared steps change it measurably
BYTES = 50  # per parameter: reading and writing it, its gradient, moments and average once
_COPIED_BYTES = 8  # per parameter: a copy reads and writes four bytes
_COMPARED_STEPS = 20
_TOLERANCE = 1e-6


def measure(*, model: ModelName = "volo_d1", pairs: Pairs = 7) -> Result:
    """Compare the updates of a model's parameters."""
    figures = []
    for name, fastest in (("timm's defaults", False), ("timm's best", True)):
        with closing(_run(model)) as run:
            figures += _compare(run, name, fastest, pairs)
    with closing(_run(model)) as run:
        network = run.context.state.model
        source = flat_weights(network)
        copying = _block(partial(torch.empty_like(source).copy_, source), copy.deepcopy(network))
        found = alternate(_block(run.step, network), copying, pairs)
    gigabytes, moved = 1e-9 * _COPIED_BYTES * source.numel(), BYTES / _COPIED_BYTES
    label = f"update: time relative to moving {BYTES} bytes per parameter at the copy's rate"
    figures += [
        Figure.of_seconds("update", found.ours),
        Figure.of("copy", gigabytes / found.peer, "GB/s"),
        Figure.of(label, found.ours / (found.peer * moved), "x"),
    ]
    return Result(f"optimizer {model}", "clip, AdamW and averaged weights, fp32, against timm's", figures)


def _run(model: str) -> SyntheticRun:
    """Build a run whose step is the part of the engine's step after backward."""
    config = bench_config(model=model, clip_grad=MAX_NORM, ema_decay=EMA, weight_decay=WEIGHT_DECAY)
    run = SyntheticRun(config)
    run.context.lr = lambda step: LR  # noqa: ARG005
    # Without micro-batches; the reducer, which is built, expects the backward of one.
    run.context.config = replace(config, update=replace(config.update, accumulation=0))
    return run


def _compare(run: SyntheticRun, name: str, fastest: bool, pairs: int) -> list[Figure]:
    ours = run.context.state.model
    theirs = copy.deepcopy(ours)
    peer = TimmUpdate(theirs, lr=LR, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM, ema=EMA, fastest=fastest)
    random = torch.Generator().manual_seed(1)
    for step in range(_COMPARED_STEPS):
        # Small and large in turn: AdamW's result does not depend on a constant clip factor.
        size = (1e-4, 1e-2)[step % 2]
        gradients = [size * torch.randn(p.shape, generator=random).to(run.device) for p in ours.parameters()]
        for network, update in ((ours, run.step), (theirs, peer)):
            _set_gradients(network, gradients)
            update()
    average = run.context.state.average.models()["ema"]
    for what, one, other in (("weights", ours, theirs), ("averages", average, peer.average.module)):
        what = f"{what} after {_COMPARED_STEPS} steps, {name}"
        assert_agree(what, flat_weights(one), flat_weights(other), _TOLERANCE)
    found = alternate(_block(run.step, ours), _block(peer, theirs), pairs)
    return [Figure.of_seconds(name, found.peer), Figure.of(f"faster than {name}", found.ratios, "x")]


def _block(action: Action, model: nn.Module) -> TimedBlock:
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
