"""Parameter server against ring all-reduce, and steps of 1, 2 and 4 ranks.

Exchanges run between processes of this machine, and between emulated hosts on links of a given rate, where
the network takes most of the time. The efficiency of a step is that of ranks that exchange against ranks that
do not, on the same cores at the same time.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Annotated

import torch

from horovod_volo.bench.cli import Flag, Pairs
from horovod_volo.bench.comparison import alternate, timed
from horovod_volo.bench.network_namespaces import shaped_hosts
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.scaling_study.peers_exchange import (
    begun_together,
    measure_replay,
    measure_ring,
    measure_server_and_ring,
    on_ranks,
)
from horovod_volo.bench.synthetic import SyntheticRun, bench_config
from horovod_volo.cluster.world import World

_MIB = 2**20
GRADIENT_MIB = 8.0
RANKS = (2, 3, 4, 8)  # that exchange
# A replayed backward: when each bucket is full, in units of the gradient's transfer time, and its fraction of
# the bytes. The last is small, as ours is.
_REPLAYED = ((0.3, 0.25), (0.6, 0.25), (0.9, 0.25), (1.2, 0.22), (1.35, 0.03))
STEP_RANKS = (1, 2, 4)
_MODEL = "volo_demo"
_STEP = {"img_size": 64, "batch_size": 16, "num_classes": 10}
_STEPS_OF_BLOCK = 4


def measure(
    *,
    mbit: Annotated[
        float, Flag("rate of each host's link, in megabits a second, needs root; 0: no emulated hosts")
    ] = 200.0,
    pairs: Pairs = 7,
) -> Result:
    """Measure all numbers of ranks, one after another."""
    found: list[list[Figure]] = []
    exchanges = partial(measure_exchanges, mib=GRADIENT_MIB, pairs=pairs)
    if mbit:
        with shaped_hosts(max(RANKS), mbit) as hosts:
            found += on_ranks(RANKS, partial(exchanges, mbit=mbit), hosts)
    found += on_ranks(RANKS, partial(exchanges, mbit=0.0), hosts=())
    found += on_ranks(STEP_RANKS, partial(measure_steps, pairs=pairs), hosts=())
    title = f"a gradient of {GRADIENT_MIB:g} MiB exchanged by a parameter server and by the ring; steps of "
    title += f"{_MODEL}, {_STEP['img_size']} px, {_STEP['batch_size']} images a rank"
    return Result("scaling", title, list(itertools.chain(*found)))


def replayed_messages(mib: float, mbit: float) -> list[tuple[float, int]]:
    """Return the messages of the replayed backward: seconds when each is ready, and its bytes."""
    transfer = mib * _MIB * 8 / (mbit * 1e6)
    return [(when * transfer, round(part * mib * _MIB) // 4 * 4) for when, part in _REPLAYED]


def measure_exchanges(world: World, *, mib: float, mbit: float, pairs: int) -> list[Figure]:
    """Measure server and ring; on hosts also half the size and a replayed backward, for the simulator.

    Collective: every rank calls this.
    """
    where = f"{world.size} hosts of {mbit:g} Mbit/s" if mbit else f"{world.size} processes"
    figures = []
    if mbit:
        seconds = measure_ring(world, round(mib / 2 * _MIB), pairs)
        figures.append(Figure.of_seconds(f"{where}, {mib / 2:g} MiB: ring", seconds))
    times = measure_server_and_ring(world, round(mib * _MIB), pairs)
    figures += [
        Figure.of_seconds(f"{where}, {mib:g} MiB: ring", times.ours),
        Figure.of_seconds(f"{where}, {mib:g} MiB: server", times.peer),
        Figure.of(f"{where}, {mib:g} MiB: ring faster", times.ratios, "x"),
    ]
    if mbit:
        seconds = measure_replay(world, replayed_messages(mib, mbit), pairs)
        figures.append(Figure.of_seconds(f"{where}: backward played back, and the ring", seconds))
    return figures


def measure_steps(world: World, *, pairs: int) -> list[Figure]:
    """Measure a step with and without exchange. Collective: every rank calls this."""
    runs = [SyntheticRun(bench_config(model=_MODEL, **_STEP), ranks) for ranks in (world, World.single())]
    torch.set_num_threads(1)  # building a run sets this rank's part of the host, which may be more
    ours, peer = (begun_together(timed(run.step, _STEPS_OF_BLOCK, run.device)) for run in runs)
    ours(), peer()  # the first steps include one-time work
    times = alternate(ours, peer, pairs)
    label, images = f"{world.size} ranks: ", _STEPS_OF_BLOCK * world.size * _STEP["batch_size"]
    figures = [Figure.of_rate(f"{label}steps", times.ours, images)]
    if world.size > 1:
        figures.append(Figure.of(f"{label}of the speed without exchange", 100 * times.ratios, "%"))
    return figures
