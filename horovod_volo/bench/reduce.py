"""How much of the exchange of gradients is left to wait for: whole steps, ours and those of others.

Ranks that train each for itself are the floor. What a step takes longer than theirs is the exposed part of
its exchange, the work that this takes from the cores included. A round has a block of each way, forwards and
backwards in turn, and every rank ends a block when the last one does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from time import perf_counter, process_time

import torch
from torch import Tensor

from horovod_volo.bench import exchanges
from horovod_volo.bench.agreement import assert_agree
from horovod_volo.bench.exchanges import Compression, Way, Work, weights
from horovod_volo.bench.pairs import BLOCK_SECONDS, Action, wait_for
from horovod_volo.bench.results import Figure, Result
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.pinning import bind
from horovod_volo.cluster.resources import rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.core.errors import UserError
from horovod_volo.models.build import build_model

CLASSES = 1000
OURS, STOCK, DDP, LATE, FLOOR = "ours", "stock Horovod", "torch DDP", "after backward", "no exchange"
PEERS = {"stock": STOCK, "ddp": DDP, "late": LATE}
_COMPARED_STEPS = 3
_TRIALS = 4
_TOLERANCES: dict[Compression, float] = {"none": 1e-4, "fp16": 1e-2}  # of the way the weights have gone
_MILLISECONDS = 1e3
_HOROVODS_FUSION = 128 * 2**20


@dataclass
class Times:
    """Seconds a step, round by round: until the last rank was through, and of the processor, a rank."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def measure(
    *, model: str, img_size: int, batch_size: int, pairs: int, against: Sequence[str] = tuple(PEERS)
) -> Result:
    """Measure so many rounds of our way, of no exchange, and of others on all ranks.

    Collective: every rank calls this.
    """
    if read_launch_env().size == 1:
        raise UserError(
            "There is nothing to reduce on one rank. Start several: "
            "horovodrun -np 2 python -m horovod_volo.bench reduce"
        )
    # The trainer lets Horovod fuse nothing; stock Horovod lives by it, and has it here.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(_HOROVODS_FUSION))
    cpus = os.sched_getaffinity(0)
    world = World.connect(bind("numa"))  # as the trainer does
    try:
        others = [PEERS[name] for name in against]
        return _measured(world, model, img_size, batch_size, others, pairs)
    finally:
        os.sched_setaffinity(0, cpus)  # what is told of the hardware counts them


def _measured(
    world: World, model: str, img_size: int, batch_size: int, others: Sequence[str], rounds: int
) -> Result:
    # Imported here: it brings in what one rank alone need not have.
    from horovod_volo.bench.peers_reduce import torch_ranks

    device = rank_resources(world).device
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = build_model(model, img_size=img_size, num_classes=CLASSES, drop_path=0.0).to(device).train()
    random = torch.Generator().manual_seed(world.rank)
    images = torch.randn(batch_size, 3, img_size, img_size, generator=random).to(device)
    classes = torch.randint(CLASSES, (batch_size,), generator=random).to(device)
    work = Work(network, images, classes)
    clock = _Clock(world, device)
    with torch_ranks(world, device):
        ways = _fit_ways(work, clock, others)
        figures = _figures(ways, work, clock, rounds)
    forms = ", ".join(f"{name}: {way.form}" for name, way in ways.items() if name in (OURS, STOCK, DDP))
    title = f"step, {img_size} px, {world.size} x {batch_size} images ({world.controller}); {forms}"
    return Result(f"reduce {model} {img_size} px", title, figures)


class _Clock:
    """Times blocks of steps that all ranks begin and end together."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self._device = world, device

    def block(self, action: Action, repeats: int) -> tuple[float, float]:
        """Return seconds of a call until the last rank is through, and of the processor, a rank."""
        self.world.broadcast_object(None)
        began, cpu_before = perf_counter(), process_time()
        for _ in range(repeats):
            action()
        wait_for(self._device)
        taken = (perf_counter() - began) / repeats, (process_time() - cpu_before) / repeats
        walls, cpus = zip(*self.world.allgather_object(taken), strict=True)
        return max(walls), fmean(cpus)

    def repeats(self, action: Action) -> int:
        """Return how many calls make a block, the same on all ranks."""
        seconds, _ = self.block(action, 1)
        return max(1, math.ceil(BLOCK_SECONDS / seconds))


def _fit_ways(work: Work, clock: _Clock, others: Sequence[str]) -> dict[str, Way]:
    """Build ours as it is, others in their fastest forms, having seen that all end at the same weights."""
    start = weights(work.network)
    late = exchanges.after_backward(work, clock.world)
    for _ in range(_COMPARED_STEPS):
        late.step()
    agreeing = partial(_agreeing, start=start, moved=weights(late.lesson) - start, clock=clock)
    ways = {OURS: agreeing(exchanges.ours(work, clock.world))}
    if STOCK in others:
        ways[STOCK] = _fastest([agreeing(way) for way in exchanges.stock_horovod(work)], clock)
    if DDP in others:
        ways[DDP] = _fastest([agreeing(way) for way in exchanges.torch_ddp(work)], clock)
    if LATE in others:
        ways[LATE] = late
    floor = exchanges.no_exchange(work)
    floor.step()
    return ways | {FLOOR: floor}


def _agreeing(way: Way, start: Tensor, moved: Tensor, clock: _Clock) -> Way:
    """Return the way, which has moved the weights as `moved` says."""
    for _ in range(_COMPARED_STEPS):
        way.step()
    what = f"weights after {_COMPARED_STEPS} steps, {way.form}"
    assert_agree(what, weights(way.lesson) - start, moved, _TOLERANCES[way.compression])
    clock.world.assert_identical(way.lesson.parameters(), what)
    return way


def _fastest(forms: Sequence[Way], clock: _Clock) -> Way:
    """Return the form that has the shortest step."""
    repeats = clock.repeats(forms[0].step)
    # In turns, and the shortest of several: the machine may be busy with something else for a while.
    trials = [[clock.block(way.step, repeats)[0] for way in forms] for _ in range(_TRIALS)]
    shortest = [min(seconds) for seconds in zip(*trials, strict=True)]
    return forms[shortest.index(min(shortest))]


def _figures(ways: Mapping[str, Way], work: Work, clock: _Clock, rounds: int) -> list[Figure]:
    before = ways[OURS].messages()
    ways[OURS].step()
    messages = ways[OURS].messages() - before
    repeats = clock.repeats(ways[OURS].step)
    times = {name: Times() for name in ways}
    backward, alone = [], []
    for number in range(rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            wall, cpu = clock.block(ways[name].step, repeats)
            times[name].wall.append(wall)
            times[name].cpu.append(cpu)
        alone.append(clock.block(ways[OURS].exchange, repeats)[0])
        backward.append(_backward_seconds(ways[FLOOR], work, clock))
    return [*_of_times(times), *_of_parts(backward, alone, messages)]


def _backward_seconds(way: Way, work: Work, clock: _Clock) -> float:
    loss = work.loss(way.lesson)
    return clock.block(loss.backward, 1)[0]


def _of_times(times: Mapping[str, Times]) -> list[Figure]:
    floor = times[FLOOR]
    exposed = {name: _longer(times[name].wall, floor.wall) for name in times if name != FLOOR}
    worked = {name: _longer(times[name].cpu, floor.cpu) for name in exposed}
    efficiency = [100 * alone / taken for alone, taken in zip(floor.wall, times[OURS].wall, strict=True)]
    left = median(exposed[OURS])
    return [
        Figure.of("efficiency against no exchange", efficiency, "%"),
        *(Figure.of(f"{name}: step", _milliseconds(times[name].wall), "ms") for name in times),
        *(Figure.of(f"{name}: exposed", _milliseconds(exposed[name]), "ms") for name in exposed),
        *(Figure.of(f"{name}: processor time", _milliseconds(worked[name]), "ms") for name in worked),
        *(
            Figure(f"exposed, as a share of {name}'s", left / median(exposed[name]), "x")
            for name in (STOCK, DDP)
            if name in exposed
        ),
    ]


def _of_parts(backward: Sequence[float], alone: Sequence[float], messages: int) -> list[Figure]:
    return [
        Figure.of("backward", _milliseconds(backward), "ms"),
        Figure.of("our exchange by itself", _milliseconds(alone), "ms"),
        Figure("our messages a step", messages, ""),
    ]


def _longer(values: Sequence[float], floor: Sequence[float]) -> list[float]:
    return [value - least for value, least in zip(values, floor, strict=True)]


def _milliseconds(seconds: Sequence[float]) -> list[float]:
    return [_MILLISECONDS * value for value in seconds]
