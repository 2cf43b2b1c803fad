"""Exposed time of the gradient all-reduce: whole training steps, ours and those of other methods.

Ranks that train without exchange are the baseline; what a step takes longer than theirs is the exposed part
of its exchange, including the processor time that the exchange takes from backward. A round has a block of
each method, in forward and reverse order alternately. `overlap` runs the same on two ranks of this machine in
a network namespace of its own, whose only link, the loopback, has the given rate.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from time import perf_counter, process_time
from typing import Annotated, Literal

import numpy as np
import torch

from horovod_volo.bench.cli import BatchSize, Flag, ImgSize, ModelName, Pairs
from horovod_volo.bench.comparison import Action, assert_agree, repeats_for, wait_for
from horovod_volo.bench.machine.peers_reduce import (
    DDP,
    FORMS,
    STOCK,
    Method,
    ReducerMethod,
    Work,
    no_exchange,
    torch_ranks,
)
from horovod_volo.bench.network_namespaces import missing_for_namespaces, shaped_loopback
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import CLASSES, bench_config, flat_weights, random_batch
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.cluster.pinning import bind
from horovod_volo.cluster.resources import rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.config.update_settings import Exchange
from horovod_volo.core.errors import UserError
from horovod_volo.models.build import build_model, spec_of

OURS, LATE, BASELINE = "ours", "after backward", "no exchange"
PEERS = {"stock": STOCK, "ddp": DDP, "late": LATE}  # values of --against and names in figures
_COMPARED_STEPS = 3
_TRIALS = 4
_TOLERANCES = {"none": 1e-4, "fp16": 1e-2}  # relative to the largest change of a weight
_HOROVODS_FUSION = 128 * 2**20
_TIMEOUT_SECONDS = 1200

MethodNames = Annotated[
    Sequence[Literal["stock", "ddp", "late"]],
    Flag("stock Horovod, torch DDP, our buckets sent after backward; may be empty", may_be_empty=True),
]


def measure(
    *,
    model: ModelName = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 4,
    pairs: Pairs = 5,
    against: MethodNames = ("stock", "ddp", "late"),
) -> Result:
    """Measure rounds of our method, of no exchange, and of others. Collective: every rank calls this."""
    if read_launch_env().size == 1:
        raise UserError(
            "There is nothing to reduce on one rank. Start several: "
            "horovodrun -np 2 python -m horovod_volo.bench reduce"
        )
    config = bench_config(model=model, img_size=img_size, batch_size=batch_size)
    # The trainer turns Horovod's tensor fusion off; stock Horovod depends on it, so it is on here.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(_HOROVODS_FUSION))
    cpus = os.sched_getaffinity(0)
    world = World.connect(bind("numa"))  # as the trainer does
    try:
        forms, figures = _measure(world, config, [PEERS[name] for name in against], pairs)
    finally:
        os.sched_setaffinity(0, cpus)  # the record's hardware counts them
    title = f"step, {img_size} px, {world.size} x {batch_size} images ({world.controller}); {forms}"
    return Result(f"reduce {model} {img_size} px", title, figures)


def _measure(world: World, config: Config, peers: Sequence[str], rounds: int) -> tuple[str, list[Figure]]:
    """Return the measured forms of the methods, and the figures."""
    device, model = rank_resources(world).device, config.model.model
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = build_model(model, img_size=config.model.img_size, num_classes=CLASSES, drop_path=0.0)
    batch = random_batch(config, device, seed=world.rank)
    heads = [f"network.{head}" for head in spec_of(model).heads]
    work = Work(world, network.to(device).train(), heads, batch.images, batch.labels.classes)
    with torch_ranks(world, device):
        methods = _build_methods(work, peers)
        figures = _figures(methods, work, rounds)
    shown = [f"{name}: {methods[name].form}" for name in methods if name in (OURS, STOCK, DDP)]
    return ", ".join(shown), figures


def _block(work: Work, action: Action, repeats: int) -> tuple[float, float]:
    """Return seconds per call from a common start until the last rank's end, and the mean processor time."""
    work.world.broadcast_object(None)
    began, cpu_before = perf_counter(), process_time()
    for _ in range(repeats):
        action()
    wait_for(work.images.device)
    taken = (perf_counter() - began) / repeats, (process_time() - cpu_before) / repeats
    walls, cpus = zip(*work.world.allgather_object(taken), strict=True)
    return max(walls), fmean(cpus)


def _repeats(work: Work, action: Action) -> int:
    """Return how many calls make a block, the same on all ranks."""
    return repeats_for(lambda: _block(work, action, 1)[0])


def _build_methods(work: Work, peers: Sequence[str]) -> dict[str, Method]:
    """Build all methods, the peers in their fastest form; raise unless all lead to the same weights."""
    start = flat_weights(work.network)
    late = ReducerMethod(work, "none", overlap=False)
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

    methods = {OURS: checked(ReducerMethod(work, Exchange().compression, overlap=True))}
    for name in FORMS:
        if name in peers:
            methods[name] = _fastest(work, [checked(build(work)) for build in FORMS[name]])
    if LATE in peers:
        methods[LATE] = late
    methods[BASELINE] = no_exchange(work)
    methods[BASELINE].step()
    return methods


def _fastest(work: Work, forms: Sequence[Method]) -> Method:
    """Return the form with the shortest step."""
    repeats = _repeats(work, forms[0].step)
    # Alternating, and the shortest of several: other load on the machine may last for a while.
    trials = [[_block(work, form.step, repeats)[0] for form in forms] for _ in range(_TRIALS)]
    return forms[int(np.min(trials, axis=0).argmin())]


def _figures(methods: dict[str, Method], work: Work, rounds: int) -> list[Figure]:
    ours, baseline = methods[OURS], methods[BASELINE]
    assert isinstance(ours, ReducerMethod)
    before = ours.collectives.allreduces
    ours.step()
    messages = ours.collectives.allreduces - before
    repeats = _repeats(work, ours.step)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
    backward, alone = [], []
    for number in range(rounds):
        for name in list(methods)[:: -1 if number % 2 else 1]:
            times[name].append(_block(work, methods[name].step, repeats))
        alone.append(_block(work, ours.exchange, repeats)[0])
        backward.append(_block(work, work.loss(baseline.model).backward, 1)[0])
    wall, processor = ({name: np.array(times[name])[:, place] for name in methods} for place in (0, 1))
    exposed = {name: wall[name] - wall[BASELINE] for name in methods if name != BASELINE}
    used = {name: processor[name] - processor[BASELINE] for name in exposed}
    left = {name: float(np.median(seconds)) for name, seconds in exposed.items()}
    return [
        Figure.of("efficiency against no exchange", 100 * wall[BASELINE] / wall[OURS], "%"),
        *(Figure.of_seconds(f"{name}: step", wall[name]) for name in methods),
        *(Figure.of_seconds(f"{name}: exposed", exposed[name]) for name in exposed),
        *(Figure.of_seconds(f"{name}: processor time", used[name]) for name in exposed),
        *(
            Figure(f"exposed, relative to {name}'s", left[OURS] / left[name], "x")
            for name in FORMS
            if name in exposed
        ),
        Figure.of_seconds("backward", backward),
        Figure.of_seconds("our exchange by itself", alone),
        Figure("our messages a step", messages, ""),
    ]


def measure_overlap(
    *,
    model: ModelName = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 4,
    link: Annotated[
        int, Flag("rate of the link, both directions of all ranks together, in megabits a second")
    ] = 1000,
    pairs: Pairs = 5,
    against: MethodNames = ("stock", "ddp", "late"),
) -> Result:
    """Measure `reduce` on two ranks on such a link."""
    missing = missing_for_namespaces()
    if read_launch_env().size > 1:
        missing.append("a start without a launcher: it starts its own ranks")
    if missing:
        raise UserError(f"A slow network cannot be made here. Missing: {'; '.join(missing)}.")
    horovodrun = [str(Path(sys.executable).parent / "horovodrun"), "-np", "2", "--gloo"]
    flags = f"--model {model} --img-size {img_size} --batch-size {batch_size} --pairs {pairs} --against"
    bench = [sys.executable, "-m", "horovod_volo.bench", "reduce", "--json", *flags.split(), *against]
    command = shaped_loopback(link, shlex.join([*horovodrun, "--network-interface", "lo", *bench]))
    # At the time limit the first process of the namespace is killed, and all others end with it.
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    if done.returncode:
        raise UserError(
            f"The ranks on the slow link ended with an error:\n{done.stdout}{done.stderr}".rstrip()
        )
    line = next(line for line in done.stdout.splitlines() if '"figures"' in line)
    record = json.loads(line[line.index("{") :])  # horovodrun prefixes the rank
    found = {figure["label"]: figure for figure in record["figures"]}
    # The percentage of our exchange, as far as backward lasts, that does not lengthen the step.
    left = found[f"{OURS}: exposed"]
    hideable = min(found[label]["value"] for label in ("backward", "our exchange by itself"))
    hidden, low, high = (100 * (1 - left[end] / hideable) for end in ("value", "high", "low"))
    shown = [f"{name}: exposed" for name in (OURS, *(PEERS[name] for name in against))]
    figures = [Figure(**found[label]) for label in (*shown, "backward", "our exchange by itself")]
    figures.insert(0, Figure("hidden of our exchange", hidden, "%", low, high))
    return Result(f"overlap {model}", f"{record['title']}; link of {link:,} Mbit/s", figures)
