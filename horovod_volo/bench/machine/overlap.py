"""How much of the all-reduce overlaps with backward where the network is slow, on one machine.

The benchmark `reduce` runs on two ranks in a network namespace of its own, whose only link, the loopback, has
the given rate. The namespaces end with their first process, and with them all that runs there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from horovod_volo.bench.cli import BatchSize, Flag, ImgSize, Model, Pairs
from horovod_volo.bench.machine.reduce import OURS, PEERS, Against
from horovod_volo.bench.network_namespaces import missing_for_namespaces, shaped_loopback
from horovod_volo.bench.results import Figure, Result
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.core.errors import UserError

_RANKS = 2
_TIMEOUT_SECONDS = 1200


def measure(
    *,
    model: Model = "volo_d1",
    img_size: ImgSize = 224,
    batch_size: BatchSize = 4,
    link: Annotated[
        int, Flag("rate of the link, both directions of all ranks together, in megabits a second")
    ] = 1000,
    pairs: Pairs = 5,
    against: Against = ("stock", "ddp", "late"),
) -> Result:
    """Measure `reduce` on such a link."""
    missing = missing_for_namespaces()
    if read_launch_env().size > 1:
        missing.append("a start without a launcher: it starts its own ranks")
    if missing:
        raise UserError(f"A slow network cannot be made here. Missing: {'; '.join(missing)}.")
    flags = {"--model": model, "--img-size": img_size, "--batch-size": batch_size, "--pairs": pairs}
    words = [str(word) for pair in flags.items() for word in pair]
    record = _reduce_on_link(link, [*words, "--against", *against])
    figures = {figure["label"]: Figure(**figure) for figure in record["figures"]}
    shown = [f"{name}: exposed" for name in (OURS, *(PEERS[name] for name in against))]
    shown += ["backward", "our exchange by itself"]
    title = f"{record['title']}; link of {link:,} Mbit/s"
    return Result(f"overlap {model}", title, [_hidden(figures), *(figures[label] for label in shown)])


def _hidden(figures: Mapping[str, Figure]) -> Figure:
    """Return the percentage of our exchange, as far as backward lasts, that does not lengthen the step."""
    hideable = min(figures["backward"].value, figures["our exchange by itself"].value)
    left = figures[f"{OURS}: exposed"]
    low, high = (None if end is None else 100 * (1 - end / hideable) for end in (left.high, left.low))
    return Figure("hidden of our exchange", 100 * (1 - left.value / hideable), "%", low, high)


def _reduce_on_link(link: int, flags: Sequence[str]) -> dict[str, Any]:
    """Run the benchmark `reduce` on such a link and return its record."""
    horovodrun = str(Path(sys.executable).parent / "horovodrun")
    launch = [horovodrun, "-np", str(_RANKS), "--gloo", "--network-interface", "lo", sys.executable]
    command = shlex.join([*launch, "-m", "horovod_volo.bench", "reduce", "--json", *flags])
    with subprocess.Popen(
        shaped_loopback(link, command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise UserError(f"The ranks on the slow link ended with an error:\n{output}{errors}".rstrip())
    line = next(line for line in output.splitlines() if '"figures"' in line)
    record: dict[str, Any] = json.loads(line[line.index("{") :])  # horovodrun prefixes the rank
    return record
