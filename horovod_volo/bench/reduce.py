"""Exposed time of the gradient all-reduce: whole training steps, ours and those of other methods.

Ranks that train without exchange are the baseline; what a step takes longer than theirs is the exposed part
of its exchange, including what the exchange takes of the processor from backward. A round has a block of
each method, in forward and reverse order alternately.
"""

import os
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
import torch

from horovod_volo.bench.comparison import Action, assert_agree, repeats_for, timed
from horovod_volo.bench.peers_reduce import (
    DDP,
    FORMS,
    STOCK,
    Method,
    Work,
    no_exchange,
    our_reducer,
    torch_ranks,
)
from horovod_volo.bench.results import BatchSize, Figure, Flag, ImgSize, ModelName, Pairs, Result
from horovod_volo.bench.synthetic import CLASSES, bench_config, flat_weights, random_batch
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.pinning import bind
from horovod_volo.cluster.world import World, rank_resources
from horovod_volo.config.update_settings import Exchange
from horovod_volo.core.errors import UserError
from horovod_volo.models.build import build_model, spec_of

OURS, LATE, BASELINE = "ours", "after backward", "no exchange"
FP32, REPRODUCIBLE = "ours in fp32", "reproducible"
# Values of --against, and names in figures.
PEERS = {"stock": STOCK, "ddp": DDP, "late": LATE, "fp32": FP32, "reproducible": REPRODUCIBLE}
_BACKWARD, _ALONE = "backward", "our exchange by itself"
_COMPARED_STEPS = 3
_TRIALS = 4
_TOLERANCES = {"none": 1e-4, "fp16": 1e-2}  # relative to the largest change of a weight
_HOROVODS_FUSION = 128 * 2**20


def measure(
    *,
    model: ModelName = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 4,
    pairs: Pairs = 5,
    against: Annotated[
        Sequence[Literal["stock", "ddp", "late", "fp32", "reproducible"]],
        Flag("others, or ours after backward, in fp32, with --reproducible; may be empty", may_be_empty=True),
    ] = ("stock", "ddp", "late"),
) -> Result:
    """Measure rounds of our method, of no exchange, and of others. Collective: every rank calls this."""
    if read_launch_env().size == 1:
        raise UserError(
            "There is nothing to reduce on one rank. Start several: "
            "horovodrun -np 2 horovod-volo bench reduce"
        )
    config = bench_config(model=model, img_size=img_size, batch_size=batch_size)
    # The trainer turns Horovod's tensor fusion off; stock Horovod depends on it, so it is on here.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(_HOROVODS_FUSION))
    cpus = os.sched_getaffinity(0)
    world = World.connect(bind("numa"))  # as the trainer does
    device = rank_resources(world).device
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = build_model(model, img_size=img_size, num_classes=CLASSES, drop_path=0.0)
    batch = random_batch(config, device, seed=world.rank)
    heads = [f"network.{head}" for head in spec_of(model).heads]
    work = Work(world, network.to(device).train(), heads, batch.images, batch.labels.classes)
    with torch_ranks(world, device):
        methods = _build_methods(work, [PEERS[name] for name in against])
        figures = _figures(methods, work, pairs)
    os.sched_setaffinity(0, cpus)  # the record's hardware counts them
    forms = ", ".join(f"{name}: {methods[name].form}" for name in methods if name in (OURS, STOCK, DDP))
    title = f"step, {img_size} px, {world.size} x {batch_size} images ({world.controller}); {forms}"
    return Result(f"reduce {model} {img_size} px", title, figures)


def _block(work: Work, action: Action, repeats: int) -> float:
    """Return the seconds of a call, from a common start until the last rank's end. Collective."""
    work.world.broadcast_object(None)
    seconds = timed(action, repeats, work.images.device)()
    slowest: float = max(work.world.allgather_object(seconds))
    return slowest


def _repeats(work: Work, action: Action) -> int:
    """Return how many calls make a block, the same on all ranks."""
    return repeats_for(lambda: _block(work, action, 1))


def _build_methods(work: Work, peers: Sequence[str]) -> dict[str, Method]:
    """Build all methods, the peers in their fastest form; raise unless all lead to the same weights."""
    start = flat_weights(work.network)
    late = our_reducer(work, "none", overlap=False)
    for _ in range(_COMPARED_STEPS):
        late.step()
    expected = flat_weights(late.model) - start

    def checked(method: Method) -> Method:
        for _ in range(_COMPARED_STEPS):
            method.step()
        what = f"weights after {_COMPARED_STEPS} steps, {method.form}"
        tolerance = _TOLERANCES[method.compression]
        assert_agree(what, flat_weights(method.model) - start, expected, tolerance)
        work.world.assert_identical(method.model.parameters(), what)
        return method

    methods = {OURS: checked(our_reducer(work, Exchange().compression, overlap=True))}
    for name in FORMS:
        if name in peers:
            methods[name] = _fastest(work, [checked(build(work)) for build in FORMS[name]])
    if LATE in peers:
        methods[LATE] = late
    if FP32 in peers:
        methods[FP32] = checked(our_reducer(work, "none"))
    if REPRODUCIBLE in peers:
        methods[REPRODUCIBLE] = checked(our_reducer(work, "none", kind="whole reproducible"))
    methods[BASELINE] = no_exchange(work)
    methods[BASELINE].step()
    return methods


def _fastest(work: Work, forms: Sequence[Method]) -> Method:
    repeats = _repeats(work, forms[0].step)
    # Alternating, and the shortest of several: other load on the machine may last for a while.
    trials = [[_block(work, form.step, repeats) for form in forms] for _ in range(_TRIALS)]
    return forms[int(np.min(trials, axis=0).argmin())]


def _figures(methods: dict[str, Method], work: Work, rounds: int) -> list[Figure]:
    ours, baseline = methods[OURS], methods[BASELINE]
    reducer = ours.reducer
    assert reducer is not None

    def exchange() -> None:
        with reducer.synchronized_gradients():
            pass

    repeats = _repeats(work, ours.step)
    actions = {name: method.step for name, method in methods.items()} | {_ALONE: exchange}
    ms = {name: np.empty(rounds) for name in (*actions, _BACKWARD)}
    for number in range(rounds):
        for name in list(actions)[:: -1 if number % 2 else 1]:
            ms[name][number] = 1e3 * _block(work, actions[name], repeats)
        loss = work.loss(baseline.model)  # its forward is not timed
        ms[_BACKWARD][number] = 1e3 * _block(work, loss.backward, 1)
    exposed = {name: ms[name] - ms[BASELINE] for name in methods if name != BASELINE}
    left = {name: float(np.median(taken)) for name, taken in exposed.items()}
    hideable = min(np.median(ms[_BACKWARD]), np.median(ms[_ALONE]))  # as long as backward lasts
    return [
        Figure.of("efficiency against no exchange", 100 * ms[BASELINE] / ms[OURS], "%"),
        *(Figure.of(f"{name}: step", ms[name], "ms") for name in methods),
        *(Figure.of(f"{name}: exposed", taken, "ms") for name, taken in exposed.items()),
        *(
            Figure(f"exposed, relative to {name}'s", left[OURS] / left[name], "x")
            for name in FORMS
            if name in exposed
        ),
        *(
            Figure.of(f"reproducible: step, relative to {name}", ms[REPRODUCIBLE] / ms[name], "x")
            for name in (OURS, FP32)
            if REPRODUCIBLE in methods and name in methods
        ),
        *(Figure.of(name, ms[name], "ms") for name in (_BACKWARD, _ALONE)),
        Figure.of("hidden of our exchange", 100 * (1 - exposed[OURS] / hideable), "%"),
        Figure("our messages a step", len(reducer.buckets), ""),
    ]
