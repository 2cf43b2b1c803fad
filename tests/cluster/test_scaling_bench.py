"""The emulated hosts of the scaling study: link rates are as requested, and nothing remains afterwards."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from horovod_volo.bench.network_namespaces import shaped_hosts
from horovod_volo.bench.results import Figure
from horovod_volo.bench.scaling_study import scaling

pytestmark = pytest.mark.needs("ip", "unshare")

MBIT = 100.0
MIB = 1.0
SLACK = 0.9  # a link's bucket lets a little through at once


def milliseconds(figures: list[Figure], hosts: int, way: str) -> float:
    label = f"{hosts} hosts of {MBIT:g} Mbit/s, {MIB:g} MiB: {way}"
    return next(figure.value for figure in figures if figure.label == label)


def test_exchanges_take_what_the_links_allow_and_leave_nothing_behind() -> None:
    before = children()
    result = scaling.measure(
        mib=MIB, mbit=MBIT, ranks=[2, 3], steps_of="", img_size=32, batch_size=2, pairs=2
    )
    alone = 1e3 * MIB * 2**20 * 8 / (MBIT * 1e6)
    for hosts in (2, 3):
        assert milliseconds(result.figures, hosts, "ring") > SLACK * 2 * (hosts - 1) / hosts * alone
        assert milliseconds(result.figures, hosts, "server") > SLACK * (hosts - 1) * alone
    played_back = [figure for figure in result.figures if "played back" in figure.label]
    assert len(played_back) == 2
    assert all(figure.value > 1e3 * scaling.replayed_messages(MIB, MBIT)[-1][0] for figure in played_back)
    assert children() == before


def test_hosts_end_with_their_block() -> None:
    own = socket.gethostname()
    with shaped_hosts(2, MBIT) as hosts:
        assert all(Path(f"/proc/{host.pid}").exists() for host in hosts)
        child = os.fork()
        if child == 0:
            hosts[1].enter()
            os._exit(0 if socket.gethostname() == hosts[1].address else 1)
        assert os.waitpid(child, 0)[1] == 0
    assert not any(Path(f"/proc/{host.pid}").exists() for host in hosts)
    assert socket.gethostname() == own


def test_a_rank_that_fails_ends_the_others_and_is_told() -> None:
    with shaped_hosts(1, MBIT) as hosts:
        real = {"address": hosts[0].address, "pid": hosts[0].pid}
        nowhere = {"address": "10.78.0.2", "pid": 2**22 - 1}
        job = {"places": [real, nowhere], "mib": MIB, "ring_mib": [], "replay": [], "ranks": [2], "pairs": 2}
        with pytest.raises(RuntimeError, match="a rank of 2 ended"):
            scaling._run(job)


def children() -> set[str]:
    """Return the processes that this one has started and that are still there."""
    return {
        process
        for task in Path("/proc/self/task").iterdir()
        for process in (task / "children").read_text().split()
    }
