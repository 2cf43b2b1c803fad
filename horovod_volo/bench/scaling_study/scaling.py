"""Parameter server against ring all-reduce, and steps of 1, 2 and 4 ranks.

Exchanges run between processes of this machine, and between emulated hosts on links of a given rate, where
the network takes most of the time. The efficiency of a step is that of ranks that exchange against ranks that
do not, on the same cores at the same time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from horovod_volo.bench.cli import Flag, Pairs
from horovod_volo.bench.comparison import estimate
from horovod_volo.bench.network_namespaces import shaped_hosts
from horovod_volo.bench.results import Figure, Result

_TIMEOUT_SECONDS = 240
_MIB = 2**20
# A replayed backward: when each bucket is full, in units of the gradient's transfer time, and its fraction of
# the bytes. The last is small, as ours is.
_REPLAYED = ((0.3, 0.25), (0.6, 0.25), (0.9, 0.25), (1.2, 0.22), (1.35, 0.03))


def measure(
    *,
    mib: Annotated[float, Flag("size of the gradient, in MiB")] = 8.0,
    mbit: Annotated[
        float, Flag("rate of each host's link, in megabits a second, needs root; 0: no emulated hosts")
    ] = 200.0,
    ranks: Annotated[Sequence[int], Flag("numbers of ranks that exchange")] = (2, 3, 4, 8),
    steps_of: Annotated[
        str, Flag('model whose steps are measured; "": no steps', metavar="MODEL")
    ] = "volo_demo",
    img_size: Annotated[int, Flag("side of the images of the steps, in pixels")] = 64,
    batch_size: Annotated[int, Flag("images per rank of the steps")] = 16,
    pairs: Pairs = 7,
) -> Result:
    """Measure all numbers of ranks, one after another."""
    figures: list[Figure] = []
    exchange = {"places": [], "mib": mib, "ring_mib": [], "replay": [], "ranks": list(ranks), "pairs": pairs}
    if mbit:
        with shaped_hosts(max(ranks), mbit) as hosts:
            places = [{"address": host.address, "pid": host.pid} for host in hosts]
            on_hosts = {"places": places, "ring_mib": [mib / 2], "replay": replayed_messages(mib, mbit)}
            figures += _exchange_figures(_run(exchange | on_hosts), f"hosts of {mbit:g} Mbit/s")
    figures += _exchange_figures(_run(exchange), "processes")
    title = f"a gradient of {mib:g} MiB exchanged by a parameter server and by the ring"
    if steps_of:
        context = {"model": steps_of, "img_size": img_size, "batch_size": batch_size}
        found = _run(context | {"places": [], "ranks": [1, 2, 4], "pairs": pairs})
        figures += _step_figures(found, batch_size)
        title += f"; steps of {steps_of}, {img_size} px, {batch_size} images a rank"
    return Result("scaling", title, figures)


def replayed_messages(mib: float, mbit: float) -> list[tuple[float, int]]:
    """Return the messages of the replayed backward: seconds when each is ready, and its bytes."""
    transfer = mib * _MIB * 8 / (mbit * 1e6)
    return [(when * transfer, round(part * mib * _MIB) // 4 * 4) for when, part in _REPLAYED]


def _run(context: dict[str, Any]) -> dict[str, Any]:
    """Run a job on new ranks; return what their rank 0 measured, by number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [
            sys.executable,
            "-m",
            "horovod_volo.bench.scaling_study.ranks",
            str(file),
            json.dumps(context),
        ]
        # At the time limit the process is killed, and its ranks end with it.
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the ranks ended with status {done.returncode}:\n{done.stdout[-4000:]}")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _exchange_figures(found: dict[str, Any], where: str) -> list[Figure]:
    figures = []
    for ranks, measured in found.items():
        replay = measured.pop("replay", [])
        for mib, seconds in measured.items():
            label = f"{ranks} {where}, {mib} MiB"
            figures.append(Figure.of_seconds(f"{label}: ring", seconds["ring"]))
            if "server" in seconds:
                ratios = [peer / ours for ours, peer in zip(seconds["ring"], seconds["server"], strict=True)]
                figures.append(Figure.of_seconds(f"{label}: server", seconds["server"]))
                figures.append(Figure.of_estimate(f"{label}: ring faster", estimate(ratios), "x"))
        if replay:
            figures.append(Figure.of_seconds(f"{ranks} {where}: backward played back, and the ring", replay))
    return figures


def _step_figures(found: dict[str, Any], batch_size: int) -> list[Figure]:
    figures = []
    for ranks, seconds in found.items():
        together, apart = seconds["together"], seconds["apart"]
        figures.append(Figure.of_rate(f"{ranks} ranks: steps", together, int(ranks) * batch_size))
        if int(ranks) > 1:
            ratios = [100 * alone / exchanging for exchanging, alone in zip(together, apart, strict=True)]
            figures.append(Figure.of(f"{ranks} ranks: of the speed without exchange", ratios, "%"))
    return figures
