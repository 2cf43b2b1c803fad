"""Exposed time of the gradient all-reduce: whole training steps, ours and those of other methods.

Ranks that train without exchange are the baseline; what a step takes longer than theirs is the exposed part
of its exchange, including the processor time that the exchange takes from backward. A round has a block of
each method, in forward and reverse order alternately, and a block ends on every rank when the last rank has
ended.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median
from time import perf_counter, process_time
from typing import Annotated, Literal

import torch

from horovod_volo.bench import comparison
from horovod_volo.bench.cli import BatchSize, Flag, ImgSize, Model, Pairs
from horovod_volo.bench.comparison import Action, assert_agree, wait_for
from horovod_volo.bench.machine.peers_reduce import DDP, FORMS, STOCK, torch_ranks
from horovod_volo.bench.machine.reduce_methods import (
    Method,
    Work,
    after_backward,
    network_heads,
    no_exchange,
    ours,
)
from horovod_volo.bench.results import Figure, Result
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.pinning import bind
from horovod_volo.cluster.resources import rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.core.errors import UserError
from horovod_volo.models.build import build_model

CLASSES = 1000
OURS, LATE, BASELINE = "ours", "after backward", "no exchange"
PEERS = {"stock": STOCK, "ddp": DDP, "late": LATE}  # values of --against and names in figures
_COMPARED_STEPS = 3
_TRIALS = 4
_TOLERANCES = {"none": 1e-4, "fp16": 1e-2}  # relative to the largest change of a weight
_HOROVODS_FUSION = 128 * 2**20

Times = dict[str, list[float]]  # seconds per step, round by round, by the name of the method
Against = Annotated[
    Sequence[Literal["stock", "ddp", "late"]],
    Flag(
        "methods to compare with: stock Horovod, torch DDP, our buckets sent after backward; may be empty",
        may_be_empty=True,
    ),
]


def measure(
    *,
    model: Model = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 4,
    pairs: Pairs = 5,
    against: Against = ("stock", "ddp", "late"),
) -> Result:
    """Measure rounds of our method, of no exchange, and of others. Collective: every rank calls this."""
    if read_launch_env().size == 1:
        raise UserError(
            "There is nothing to reduce on one rank. Start several: "
            "horovodrun -np 2 python -m horovod_volo.bench reduce"
        )
    # The trainer turns Horovod's tensor fusion off; stock Horovod depends on it, so it is on here.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(_HOROVODS_FUSION))
    cpus = os.sched_getaffinity(0)
    world = World.connect(bind("numa"))  # as the trainer does
    try:
        return _measure(world, model, img_size, batch_size, [PEERS[name] for name in against], pairs)
    finally:
        os.sched_setaffinity(0, cpus)  # the record's hardware counts them


def _measure(
    world: World, model: str, img_size: int, batch_size: int, peers: Sequence[str], rounds: int
) -> Result:
    device = rank_resources(world).device
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = build_model(model, img_size=img_size, num_classes=CLASSES, drop_path=0.0).to(device).train()
    random = torch.Generator().manual_seed(world.rank)
    images = torch.randn(batch_size, 3, img_size, img_size, generator=random).to(device)
    classes = torch.randint(CLASSES, (batch_size,), generator=random).to(device)
    work, clock = Work(world, network, network_heads(model), images, classes), _Clock(world, device)
    with torch_ranks(world, device):
        methods = _build_methods(work, clock, peers)
        figures = _figures(methods, work, clock, rounds)
    forms = ", ".join(f"{name}: {methods[name].form}" for name in methods if name in (OURS, STOCK, DDP))
    title = f"step, {img_size} px, {world.size} x {batch_size} images ({world.controller}); {forms}"
    return Result(f"reduce {model} {img_size} px", title, figures)


class _Clock:
    """Times blocks of steps that all ranks begin and end together."""

    def __init__(self, world: World, device: torch.device) -> None:
        self.world, self._device = world, device

    def block(self, action: Action, repeats: int) -> tuple[float, float]:
        """Return seconds per call until the last rank has ended, and processor time, mean over ranks."""
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
        return max(1, math.ceil(comparison.BLOCK_SECONDS / self.block(action, 1)[0]))


def _build_methods(work: Work, clock: _Clock, peers: Sequence[str]) -> dict[str, Method]:
    """Build all methods, the peers in their fastest form; raise unless all lead to the same weights."""
    start = _weights(work.network)
    late = after_backward(work)
    for _ in range(_COMPARED_STEPS):
        late.step()
    expected = _weights(late.model) - start

    def checked(build: Callable[[Work], Method]) -> Method:
        method = build(work)
        for _ in range(_COMPARED_STEPS):
            method.step()
        what = f"weights after {_COMPARED_STEPS} steps, {method.form}"
        assert_agree(what, _weights(method.model) - start, expected, _TOLERANCES[method.compression])
        clock.world.assert_identical(method.model.parameters(), what)
        return method

    methods = {OURS: checked(ours)}
    for name in FORMS:
        if name in peers:
            methods[name] = _fastest([checked(build) for build in FORMS[name]], clock)
    if LATE in peers:
        methods[LATE] = late
    methods[BASELINE] = no_exchange(work)
    methods[BASELINE].step()
    return methods


def _fastest(forms: Sequence[Method], clock: _Clock) -> Method:
    """Return the form with the shortest step."""
    repeats = clock.repeats(forms[0].step)
    # Alternating, and the shortest of several: other load on the machine may last for a while.
    trials = [[clock.block(form.step, repeats)[0] for form in forms] for _ in range(_TRIALS)]
    shortest = [min(seconds) for seconds in zip(*trials, strict=True)]
    return forms[shortest.index(min(shortest))]


def _figures(methods: Mapping[str, Method], work: Work, clock: _Clock, rounds: int) -> list[Figure]:
    before = methods[OURS].messages()
    methods[OURS].step()
    messages = methods[OURS].messages() - before
    repeats = clock.repeats(methods[OURS].step)
    wall: Times = {name: [] for name in methods}  # until the last rank has ended
    cpu: Times = {name: [] for name in methods}  # processor time, mean over ranks
    backward, alone = [], []
    for number in range(rounds):
        for name in list(methods)[:: -1 if number % 2 else 1]:
            for times, seconds in zip((wall, cpu), clock.block(methods[name].step, repeats), strict=True):
                times[name].append(seconds)
        alone.append(clock.block(methods[OURS].exchange, repeats)[0])
        backward.append(clock.block(work.loss(methods[BASELINE].model).backward, 1)[0])
    return [
        *_step_figures(wall, cpu),
        Figure.of_seconds("backward", backward),
        Figure.of_seconds("our exchange by itself", alone),
        Figure("our messages a step", messages, ""),
    ]


def _step_figures(wall: Times, cpu: Times) -> list[Figure]:
    exposed, processor = (
        {name: _minus(times[name], times[BASELINE]) for name in times if name != BASELINE}
        for times in (wall, cpu)
    )
    efficiency = [100 * alone / taken for alone, taken in zip(wall[BASELINE], wall[OURS], strict=True)]
    left = median(exposed[OURS])
    return [
        Figure.of("efficiency against no exchange", efficiency, "%"),
        *(Figure.of_seconds(f"{name}: step", wall[name]) for name in wall),
        *(Figure.of_seconds(f"{name}: exposed", exposed[name]) for name in exposed),
        *(Figure.of_seconds(f"{name}: processor time", processor[name]) for name in exposed),
        *(
            Figure(f"exposed, as a share of {name}'s", left / median(exposed[name]), "x")
            for name in FORMS
            if name in exposed
        ),
    ]


def _minus(values: Iterable[float], baseline: Iterable[float]) -> list[float]:
    return [value - least for value, least in zip(values, baseline, strict=True)]


def _weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
