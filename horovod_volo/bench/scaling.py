"""How training grows with ranks: a parameter server against the ring, and steps of 1, 2 and 4 ranks.

Exchanges run on the processes of this machine, and on hosts made of it on links of a given rate, where the
network is what takes time. A step's efficiency is that of ranks that exchange against ranks that do not, on
the same cores at the same time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from horovod_volo.bench.pairs import estimate
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.shaped_hosts import shaped_hosts

_PATIENCE_SECONDS = 240
_MILLISECONDS = 1e3
_MIB = 2**20
# A backward that is played back: when each bucket is full, as a share of the gradient's time on two hosts,
# and its share of the bytes. The last is small, as ours is.
REPLAYED = ((0.3, 0.25), (0.6, 0.25), (0.9, 0.25), (1.2, 0.22), (1.35, 0.03))


def measure(
    *,
    mib: float,
    mbit: float,
    ranks: Sequence[int],
    steps_of: str,
    img_size: int,
    batch_size: int,
    pairs: int,
) -> Result:
    """Measure everything, each number of ranks one after another."""
    figures: list[Figure] = []
    if mbit:
        with shaped_hosts(max(ranks), mbit) as hosts:
            places = [{"address": host.address, "pid": host.pid} for host in hosts]
            context = {"places": places, "mib": mib, "ring_mib": [mib / 2], "replay": replayed(mib, mbit)}
            found = _run(context | {"ranks": list(ranks), "pairs": pairs})
        figures += _exchanges(found, f"hosts of {mbit:g} Mbit/s")
    context = {"places": [], "mib": mib, "ring_mib": [], "replay": []}
    figures += _exchanges(_run(context | {"ranks": list(ranks), "pairs": pairs}), "processes")
    if steps_of:
        context = {"places": [], "model": steps_of, "img_size": img_size, "batch_size": batch_size}
        figures += _steps(_run(context | {"ranks": [1, 2, 4], "pairs": pairs}), batch_size)
    title = f"a gradient of {mib:g} MiB exchanged by a parameter server and by the ring"
    if steps_of:
        title += f"; steps of {steps_of}, {img_size} px, {batch_size} images a rank"
    return Result("scaling", title, figures)


def replayed(mib: float, mbit: float) -> list[tuple[float, int]]:
    """Return the messages of the backward that is played back: seconds, and bytes of whole elements."""
    alone = mib * _MIB * 8 / (mbit * 1e6)
    return [(share * alone, round(part * mib * _MIB) // 4 * 4) for share, part in REPLAYED]


def _run(context: dict[str, Any]) -> dict[str, Any]:
    """Have the job done by ranks of their own; return what their first ones found, by number of ranks."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as undo:
        file = Path(folder) / "found.json"
        process = undo.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "horovod_volo.bench.simulation.ranks", str(file), json.dumps(context)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        undo.callback(process.kill)  # its ranks end with it
        output, _ = process.communicate(timeout=_PATIENCE_SECONDS)
        if process.returncode:
            raise RuntimeError(f"the ranks ended with status {process.returncode}:\n{output[-4000:]}")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _exchanges(found: dict[str, Any], where: str) -> list[Figure]:
    figures = []
    for ranks, measured in found.items():
        replay = measured.pop("replay", [])
        for mib, seconds in measured.items():
            label = f"{ranks} {where}, {mib} MiB"
            figures.append(
                Figure.of(f"{label}: ring", [_MILLISECONDS * taken for taken in seconds["ring"]], "ms")
            )
            if "server" in seconds:
                ratios = [peer / ours for ours, peer in zip(seconds["ring"], seconds["server"], strict=True)]
                servers = [_MILLISECONDS * taken for taken in seconds["server"]]
                figures += [
                    Figure.of(f"{label}: server", servers, "ms"),
                    Figure.of_estimate(f"{label}: ring faster", estimate(ratios), "x"),
                ]
        if replay:
            label = f"{ranks} {where}: backward played back, and the ring"
            figures.append(Figure.of(label, [_MILLISECONDS * taken for taken in replay], "ms"))
    return figures


def _steps(found: dict[str, Any], batch_size: int) -> list[Figure]:
    figures = []
    for ranks, seconds in found.items():
        speeds = [int(ranks) * batch_size / taken for taken in seconds["together"]]
        figures.append(Figure.of(f"{ranks} ranks: steps", speeds, "images/s"))
        if int(ranks) > 1:
            ratios = [
                100 * apart / together
                for together, apart in zip(seconds["together"], seconds["apart"], strict=True)
            ]
            figures.append(Figure.of(f"{ranks} ranks: of the speed without exchange", ratios, "%"))
    return figures
