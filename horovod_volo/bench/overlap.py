"""How much of the exchange backward hides where the network is slow, on one machine.

The benchmark `reduce` runs on two ranks inside a network namespace of its own, whose only link, the loopback,
passes so many bits a second and no more. Namespaces end with their first process, and all that runs there
with them: nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod_volo.bench.reduce import OURS, PEERS
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.shaped_hosts import SIMPLE_TCP
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.core.errors import UserError

_RANKS = 2
_SECONDS = 1200
_TOOLS = {"setpriv": "util-linux", "unshare": "util-linux", "ip": "iproute2", "tc": "iproute2"}
# Ends with this process, however that ends; and the process namespace ends all that was started inside.
_NAMESPACE = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"),
)


def measure(
    *,
    model: str,
    img_size: int,
    batch_size: int,
    link: int,
    pairs: int,
    against: Sequence[str] = tuple(PEERS),
) -> Result:
    """Measure on a link of so many megabits a second, which all ranks share for both directions."""
    _check()
    flags = {"--model": model, "--img-size": img_size, "--batch-size": batch_size, "--pairs": pairs}
    words = [str(word) for pair in flags.items() for word in pair]
    found = _reduce_behind(link, [*words, "--against", *against])
    told = {figure["label"]: Figure(**figure) for figure in found["figures"]}
    exposed = [f"{name}: exposed" for name in (OURS, *(PEERS[name] for name in against))]
    return Result(
        f"overlap {model}",
        f"{found['title']}; link of {link:,} Mbit/s",
        [_hidden(told), *(told[label] for label in (*exposed, "backward", "our exchange by itself"))],
    )


def _hidden(told: Mapping[str, Figure]) -> Figure:
    """Return which share of our exchange, as far as backward lasts, no step is longer for."""
    hideable = min(told["backward"].value, told["our exchange by itself"].value)
    left = told[f"{OURS}: exposed"]
    low, high = (None if end is None else 100 * (1 - end / hideable) for end in (left.high, left.low))
    return Figure("hidden of our exchange", 100 * (1 - left.value / hideable), "%", low, high)


def _check() -> None:
    """Say in one error all that is missing."""
    missing = [f"{tool} (of {package})" for tool, package in _TOOLS.items() if not shutil.which(tool)]
    if os.geteuid() != 0:
        missing.append("root, to make a network namespace")
    if read_launch_env().size > 1:
        missing.append("a start without a launcher: it starts its own ranks")
    if missing:
        raise UserError(f"A slow network cannot be made here. Missing: {'; '.join(missing)}.")


def _reduce_behind(link: int, words: list[str]) -> dict[str, Any]:
    """Run the benchmark `reduce` in a namespace with such a link and return its record."""
    horovodrun = str(Path(sys.executable).parent / "horovodrun")
    launch = [horovodrun, "-np", str(_RANKS), "--gloo", "--network-interface", "lo", sys.executable]
    inside = [
        SIMPLE_TCP,
        "ip link set lo up",
        f"tc qdisc add dev lo root tbf rate {link}mbit burst 1mb latency 100ms",
        "exec " + shlex.join([*launch, "-m", "horovod_volo.bench", "reduce", "--json", *words]),
    ]
    with subprocess.Popen(
        [*_NAMESPACE, "sh", "-ec", "\n".join(inside)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise UserError(f"The ranks behind the slow link ended with an error:\n{output}{errors}".rstrip())
    line = next(line for line in output.splitlines() if '"figures"' in line)
    record: dict[str, Any] = json.loads(line[line.index("{") :])  # after the launcher's name of the rank
    return record
