"""The simulator against cases counted by hand, and against what must hold whatever the numbers are."""

from __future__ import annotations

import json

import pytest

from horovod_volo.bench import __main__ as command_line
from horovod_volo.bench.simulate import (
    FABRICS,
    Fabric,
    GradientTimes,
    Message,
    end_of_exchange,
    expected_largest,
    measured_gradient_times,
    predicted_step,
    ring_seconds,
    tree_seconds,
)

# Four ranks a host; a thousand bytes a second between hosts, four thousand inside, hops of 1 and 10 ms.
LAN = Fabric("lan", 4000.0, 1000.0, 4, 0.5, 0.001, 0.01, 0.002, 0.02)
WORKLOAD = GradientTimes(3_000_000, (Message(0.8, 5_000_000.0), Message(1.0, 1_000_000.0)))


def test_a_ring_and_a_tree_counted_by_hand() -> None:
    # 8 ranks on 2 hosts: 14 hops, of which 2 x (2 - 1) cross hosts; 2 x 7/8 of 800 bytes at 1000 a second.
    assert ring_seconds(800, 8, LAN) == pytest.approx(0.5 + 12 * 0.001 + 2 * 0.01 + 1.4)
    # 4 ranks on one host: 6 hops; 2 x 3/4 of 800 bytes at 4000 a second.
    assert ring_seconds(800, 4, LAN) == pytest.approx(0.5 + 6 * 0.001 + 0.3)
    # 16 ranks on 4 hosts: up and down through 3 ranks of a host and 2 levels of hosts.
    assert tree_seconds(800, 16, LAN) == pytest.approx(0.5 + 2 * (3 * 0.002 + 2 * 0.02) + 1.5)


def test_latencies_are_those_of_nccls_own_model() -> None:
    fabric = FABRICS["a100-hdr"]
    found = [ring_seconds(0, ranks, fabric) for ranks in (40, 256, 1024)]
    assert found == pytest.approx([0.54e-3, 3.56e-3, 14.3e-3], rel=0.01)
    found = [tree_seconds(0, ranks, fabric) for ranks in (40, 256, 1024, 10_000)]
    assert found == pytest.approx([0.148e-3, 0.204e-3, 0.260e-3, 0.372e-3], rel=0.01)


def test_the_ring_is_that_of_measured_hosts() -> None:
    """Seconds of 4 and 8 MiB between emulated hosts on links of 200 Mbit/s, recorded at c4f3de5.

    The rate and the start were fitted to 2 and 3 hosts. More hosts compete for two cores.
    """
    links = Fabric("200 Mbit/s", 23.84e6, 23.84e6, ranks_per_host=1, start=0.0, ring_hop_between=0.0)
    measured = {4: (0.270, 0.532), 8: (0.319, 0.627)}
    for hosts, times in measured.items():
        found = [ring_seconds(mib * 2**20, hosts, links) for mib in (4, 8)]
        assert found == pytest.approx(times, rel=0.04)


@pytest.mark.parametrize(
    ("cycle", "negotiation", "phase", "end"),
    [
        (0.0, 0.0, 0.0, 10.0),  # 1 to 3, then 3 to 5, then idle, then 9 to 10
        (4.0, 0.0, 0.0, 13.0),  # sent at 4 and 12
        (4.0, 0.5, 0.0, 13.5),
        (1.0, 2.0, 0.0, 13.0),  # no cycle begins while ranks agree: at 2, 4, ..., and 10, agreed on at 12
        (1.0, 0.0, 0.3, 10.3),
    ],
)
def test_messages_queue_in_one_channel(cycle: float, negotiation: float, phase: float, end: float) -> None:
    messages = [Message(1.0, 2.0), Message(2.0, 2.0), Message(9.0, 1.0)]
    assert end_of_exchange(messages, float, cycle, negotiation, phase) == pytest.approx(end)


def test_the_slowest_of_several() -> None:
    published = {1: 0.0, 8: 1.4236, 40: 2.1608, 256: 2.83, 1024: 3.25, 10_000: 3.85}
    assert {ranks: expected_largest(ranks) for ranks in published} == pytest.approx(published, rel=0.01)


def test_predictions_counted_by_hand() -> None:
    slow, fast = Fabric("slow", 1e9, 20e6, 1, 0, 0, 0, 0, 0), Fabric("fast", 1e15, 1e15, 1, 0, 0, 0, 0, 0)
    # Backward takes 2/3 s and ends at 1. Bucket 1 is ready at 1/3 + 0.8 x 2/3 = 0.8667 and takes
    # 5e6/20e6 = 0.25: it ends at 1.1167; bucket 2 (0.05) then at 1.1667.
    assert predicted_step(WORKLOAD, slow, 1.0, 2) == pytest.approx(1.1667, abs=1e-4)
    found = predicted_step(WORKLOAD, fast, 1.0, 256, sigma=0.01)
    assert found == pytest.approx(1 + 0.01 * expected_largest(256), rel=1e-6)


def test_every_gradient_is_ready_within_backward() -> None:
    workload = measured_gradient_times("volo_demo", 32, repeats=1)
    assert workload.parameters < sum(bucket.size for bucket in workload.buckets) < 4 * workload.parameters
    ready = [bucket.ready for bucket in workload.buckets]
    assert ready == sorted(ready)
    assert 0 < ready[0] < ready[-1] <= 1


def test_the_command_reports_efficiencies(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate --models volo_d1 --fabrics h200-ndr --img-size 32 --ranks 8 256 --json"
    assert command_line.main(words.split()) == 0
    few, many = (figure["value"] for figure in json.loads(capsys.readouterr().out)["figures"])
    assert 80 < many < few < 100
