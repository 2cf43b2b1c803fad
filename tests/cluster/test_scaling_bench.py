"""The emulated hosts of the scaling study: link rates are as requested, and nothing remains afterwards."""

from __future__ import annotations

import os
import socket
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from horovod_volo.bench.network_namespaces import NetworkHost, shaped_hosts
from horovod_volo.bench.results import Figure
from horovod_volo.bench.scaling_study import scaling
from horovod_volo.bench.scaling_study.peers_exchange import on_ranks

pytestmark = pytest.mark.needs("ip", "unshare")

MBIT = 100.0
MIB = 1.0
SLACK = 0.9  # the token bucket of a link passes a little at once


def milliseconds(figures: list[Figure], hosts: int, method: str) -> float:
    label = f"{hosts} hosts of {MBIT:g} Mbit/s, {MIB:g} MiB: {method}"
    return next(figure.value for figure in figures if figure.label == label)


def test_exchanges_take_the_time_of_the_links_and_leave_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("GRADIENT_MIB", MIB), ("RANKS", (2, 3)), ("STEP_RANKS", ())):
        monkeypatch.setattr(scaling, name, value)
    resource_tracker.ensure_running()  # Python starts it with the first process pool and keeps it
    before = children()
    result = scaling.measure(mbit=MBIT, pairs=2)
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


def test_a_rank_that_fails_ends_the_others_and_is_reported() -> None:
    exchange = partial(scaling.measure_exchanges, mib=MIB, mbit=MBIT, pairs=2)
    with shaped_hosts(1, MBIT) as hosts:
        nowhere = NetworkHost("10.78.0.2", pid=2**22 - 1)
        with pytest.raises(RuntimeError, match="a rank of 2 ended"):
            on_ranks([2], exchange, [*hosts, nowhere])


def children() -> set[str]:
    """Return the child processes of this process."""
    return {
        process
        for task in Path("/proc/self/task").iterdir()
        for process in (task / "children").read_text().split()
    }
