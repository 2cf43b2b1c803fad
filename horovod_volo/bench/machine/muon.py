"""The update by Muon with the matrices shared between ranks, against AdamW's, and against Muon where each
rank orthogonalises all matrices.

Each rank computes in one thread, so that times on one and on several ranks compare. A block starts on all
ranks together and lasts until the last rank's end; its exchange is part of it. Processor time, the mean of
the ranks, depends less on other load of the machine. Gradients are the same in every step: they change
neither the operations nor the message.
"""

from __future__ import annotations

import copy
from statistics import fmean
from time import process_time
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from horovod_volo.bench.cli import ModelName, Pairs
from horovod_volo.bench.comparison import assert_agree, repeats_for, timed
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import CLASSES, flat_weights
from horovod_volo.cluster.rank_sums import WorldSums
from horovod_volo.cluster.resources import rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.models.build import build_model, exempt_from_decay, hidden_matrices, spec_of
from horovod_volo.optim.build import build_optimizer, parameter_groups, set_lr
from horovod_volo.optim.muon import MatrixRanks, OneRank, Shape, arithmetic, assign_matrices, share_matrices

_IMG_SIZE = 224
_LR, _WEIGHT_DECAY = 1e-3, 0.05
_COMPARED_STEPS = 3
_TOLERANCE = 1e-6
_ADAMW, _SHARED, _EACH = "AdamW", "Muon", "Muon, each rank all matrices"


class _Side(NamedTuple):
    network: nn.Module
    optimizer: Optimizer


def measure(*, model: ModelName = "volo_d1", pairs: Pairs = 7) -> Result:
    """Compare the updates of a model's parameters. Collective: every rank calls this."""
    world = World.connect()
    figures = _measure(world, model, pairs)
    ranks = f"{world.size} rank{'s' if world.size > 1 else ''}"
    return Result(
        f"muon {model} {ranks}", f"update by Muon on {ranks}, fp32 weights, against AdamW's", figures
    )


def _measure(world: World, model: str, pairs: int) -> list[Figure]:
    device = rank_resources(world).device
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = build_model(model, img_size=_IMG_SIZE, num_classes=CLASSES, drop_path=0.0).to(device)
    for parameter in network.parameters():
        parameter.grad = torch.randn_like(parameter)
    heads = spec_of(model).heads
    sides = {_ADAMW: _side(network, heads, "adamw"), _SHARED: _side(network, heads, "muon", WorldSums(world))}
    if world.size > 1:
        sides[_EACH] = _side(network, heads, "muon", OneRank())
        _compare(world, sides[_SHARED], sides[_EACH])
    repeats = {name: _repeats(world, side, device) for name, side in sides.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(pairs):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            taken[name].append(_block(world, sides[name], repeats[name], device))
    times, processor = ({name: np.array(taken[name])[:, place] for name in sides} for place in (0, 1))
    shapes, message = _work(network, heads)
    work = [sum(shapes[number].flops for number in own) for own in assign_matrices(shapes, world.size)]
    return [
        *(Figure.of_seconds(f"{name}: update", values) for name, values in times.items()),
        *(Figure.of_seconds(f"{name}: processor time", values) for name, values in processor.items()),
        Figure.of("time relative to AdamW's", times[_SHARED] / times[_ADAMW], "x"),
        *(
            Figure.of(f"{what} relative to each rank all matrices", values[_SHARED] / values[_EACH], "x")
            for what, values in (("time", times), ("processor time", processor))
            if _EACH in values
        ),
        Figure("operations of all matrices", 1e-9 * sum(work), "GFLOP"),
        Figure("operations of the busiest rank", 1e-9 * max(work), "GFLOP"),
        Figure("message of all updates", message / 2**20, "MiB"),
    ]


def _side(network: nn.Module, heads: tuple[str, ...], name: str, ranks: MatrixRanks | None = None) -> _Side:
    own = copy.deepcopy(network)
    parameters = dict(own.named_parameters())
    for parameter, original in zip(parameters.values(), network.parameters(), strict=True):
        parameter.grad = original.grad  # read by all sides
    groups = parameter_groups(
        parameters,
        parameters,
        exempt=exempt_from_decay(own),
        weight_decay=_WEIGHT_DECAY,
        layers={},
        layer_decay=1.0,
        matrices=hidden_matrices(own, heads) if ranks else (),
    )
    optimizer = build_optimizer(name, groups, momentum=0.9)
    set_lr(optimizer, _LR)
    if ranks:
        share_matrices(optimizer, ranks)
    return _Side(own, optimizer)


def _compare(world: World, shared: _Side, each: _Side) -> None:
    for _ in range(_COMPARED_STEPS):
        shared.optimizer.step()
        each.optimizer.step()
    what = f"weights after {_COMPARED_STEPS} steps"
    assert_agree(what, flat_weights(shared.network), flat_weights(each.network), _TOLERANCE)
    world.assert_identical(shared.network.parameters(), what)


def _repeats(world: World, side: _Side, device: torch.device) -> int:
    """Return how many steps make a block, the same on all ranks."""
    return repeats_for(lambda: _block(world, side, 1, device)[0])


def _block(world: World, side: _Side, repeats: int, device: torch.device) -> tuple[float, float]:
    """Return the slowest rank's seconds per step from a common start, and the mean processor time."""
    world.broadcast_object(None)
    before = process_time()
    seconds = timed(side.optimizer.step, repeats, device)()
    of_ranks = world.allgather_object((seconds, (process_time() - before) / repeats))
    walls, processors = zip(*of_ranks, strict=True)
    return max(walls), fmean(processors)


def _work(network: nn.Module, heads: tuple[str, ...]) -> tuple[list[Shape], int]:
    """Return the shapes of the matrices, and the bytes of all updates."""
    weights = [network.get_parameter(name) for name in sorted(hidden_matrices(network, heads))]
    shapes = [Shape(len(weight), weight[0].numel()) for weight in weights]
    width = max(arithmetic(weight).itemsize for weight in weights)
    return shapes, width * sum(shape.elements for shape in shapes)
