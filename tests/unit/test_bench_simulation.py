"""The simulator against cases counted by hand, and against what must hold whatever the numbers are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from horovod_volo.bench.scaling_study.constants import CONSTANTS, constant
from horovod_volo.bench.scaling_study.network import (
    FABRICS,
    Fabric,
    RingTime,
    calibrated,
    hierarchical_seconds,
    parameter_server_seconds,
    ring_seconds,
    tree_seconds,
)
from horovod_volo.bench.scaling_study.prediction import (
    Assumed,
    Channel,
    GradientTimes,
    Message,
    end_of_exchange,
    expected_largest,
    predicted_step,
)

# Four ranks a host; a thousand bytes a second between hosts, four thousand inside, hops of 1 and 10 ms.
LAN = Fabric(
    name="lan",
    ranks_per_host=4,
    start=0.5,
    ring_hop_inside=0.001,
    ring_hop_between=0.01,
    tree_hop_inside=0.002,
    tree_hop_between=0.02,
    inside=4000.0,
    between=1000.0,
)
FREE = Fabric("free", 4, 0.0, 0.0, 0.0, 0.0, 0.0, 4000.0, 1000.0)


def test_a_ring_between_hosts() -> None:
    # 8 ranks on 2 hosts: 14 hops, of which 2 x (2 - 1) cross hosts; 2 x 7/8 of 800 bytes at 1000 a second.
    assert ring_seconds(800, 8, LAN) == pytest.approx(0.5 + 12 * 0.001 + 2 * 0.01 + 1.4)


def test_a_ring_inside_a_host() -> None:
    # 4 ranks: 6 hops; 2 x 3/4 of 800 bytes at 4000 a second.
    assert ring_seconds(800, 4, LAN) == pytest.approx(0.5 + 6 * 0.001 + 0.3)


def test_a_tree_between_hosts() -> None:
    # 16 ranks on 4 hosts: up and down through 3 ranks of a host and 2 levels of hosts.
    assert tree_seconds(800, 16, LAN) == pytest.approx(0.5 + 2 * (3 * 0.002 + 2 * 0.02) + 1.5)


def test_a_hierarchy() -> None:
    # 8 ranks on 2 hosts: a scatter and a join inside (2 x 3/4 of 800 at 4000), a ring of 2 between.
    expected = 3 * 0.5 + 6 * 0.001 + 0.3 + 2 * 0.01 + 0.8
    assert hierarchical_seconds(800, 8, LAN) == pytest.approx(expected)


def test_a_parameter_server() -> None:
    # 3 workers' 800 bytes come in and go out at once through one link, one hop each way.
    alone = Fabric("alone", 1, 0.5, 0.0, 0.01, 0.0, 0.0, 1000.0, 1000.0)
    assert parameter_server_seconds(800, 4, alone) == pytest.approx(0.5 + 2 * 0.01 + 2.4)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 40, 256])
def test_without_latency_only_bandwidth_is_left(ranks: int) -> None:
    alone = Fabric("alone", 1, 0.0, 0.0, 0.0, 0.0, 0.0, 1000.0, 1000.0)
    ring = 2 * (ranks - 1) / ranks * 0.8
    assert ring_seconds(800, ranks, alone) == pytest.approx(ring)
    assert tree_seconds(800, ranks, alone) == pytest.approx(ring)
    assert hierarchical_seconds(800, ranks, alone) == pytest.approx(ring)
    assert parameter_server_seconds(800, ranks, alone) == pytest.approx((ranks - 1) * 0.8)
    assert parameter_server_seconds(800, ranks, alone) / ring_seconds(800, ranks, alone) == pytest.approx(
        ranks / 2
    )


@pytest.mark.parametrize("seconds", [ring_seconds, tree_seconds, hierarchical_seconds])
def test_more_ranks_and_bytes_cost_more(seconds: type) -> None:
    times = [seconds(800, ranks, LAN) for ranks in (8, 16, 32, 64, 128)]
    assert times == sorted(times)
    assert seconds(1600, 16, LAN) > seconds(800, 16, LAN)


def test_latencies_are_those_of_nccls_own_model() -> None:
    fabric = FABRICS["a100-hdr"]
    found = [ring_seconds(0, ranks, fabric) for ranks in (40, 256, 1024)]
    assert found == pytest.approx([0.54e-3, 3.56e-3, 14.3e-3], rel=0.01)
    found = [tree_seconds(0, ranks, fabric) for ranks in (40, 256, 1024, 10_000)]
    assert found == pytest.approx([0.148e-3, 0.204e-3, 0.260e-3, 0.372e-3], rel=0.01)


def a_byte_a_second(size: float) -> float:
    return size


def test_messages_queue_in_one_channel() -> None:
    messages = [Message(1.0, 2.0), Message(2.0, 2.0), Message(9.0, 1.0)]
    at_once = Channel(period=0, negotiation=0, fusion_bytes=0, blocks=False)
    # 1 to 3, then 3 to 5, then idle, then 9 to 10.
    assert end_of_exchange(messages, at_once, a_byte_a_second) == pytest.approx(10.0)
    assert end_of_exchange(messages[:2], at_once, a_byte_a_second) == pytest.approx(5.0)


def test_a_cycle_delays_and_fuses() -> None:
    messages = [Message(0.1, 2.0), Message(0.9, 2.0), Message(1.2, 2.0)]
    # Cycles at 0, 1, 2; the first two meet at 1 and are agreed on at 1.25, the third at 2.25.
    # A message costs 10 whatever its size: 1.25 to 11.25, then 11.25 to 21.25.
    channel = Channel(period=1.0, negotiation=0.25, fusion_bytes=100, blocks=False)
    assert end_of_exchange(messages, channel, lambda size: 10.0) == pytest.approx(21.25)
    # Too large to fuse: three messages.
    channel = Channel(period=1.0, negotiation=0.25, fusion_bytes=3, blocks=False)
    assert end_of_exchange(messages, channel, lambda size: 10.0) == pytest.approx(31.25)
    # The thread that agrees also carries: the next cycle begins at 11.25.
    channel = Channel(period=1.0, negotiation=0.25, fusion_bytes=100, blocks=True)
    assert end_of_exchange(messages, channel, lambda size: 10.0) == pytest.approx(21.5)


def test_what_is_hidden_is_so_only_behind_another_message() -> None:
    channel = Channel(period=0, negotiation=0, fusion_bytes=0, blocks=True, hidden=0.5)
    messages = [Message(0.0, 2.0), Message(1.0, 2.0), Message(9.0, 1.0)]
    # 0 to 2, then 2 to 3.5, then idle, then 9 to 10 in full.
    assert end_of_exchange(messages[:2], channel, a_byte_a_second) == pytest.approx(3.5)
    assert end_of_exchange(messages, channel, a_byte_a_second) == pytest.approx(10.0)


def test_the_phase_of_the_cycles_counts() -> None:
    channel = Channel(period=1.0, negotiation=0.0, fusion_bytes=0, blocks=False)
    assert end_of_exchange([Message(0.1, 1.0)], channel, a_byte_a_second, phase=0.3) == pytest.approx(1.3)


def test_the_slowest_of_several() -> None:
    assert expected_largest(1) == pytest.approx(0.0, abs=1e-9)
    assert expected_largest(2) == pytest.approx(1 / math.sqrt(math.pi), rel=1e-6)
    assert expected_largest(3) == pytest.approx(1.5 / math.sqrt(math.pi), rel=1e-6)
    published = {8: 1.4236, 40: 2.1608, 256: 2.83, 1024: 3.25, 10_000: 3.85}
    assert {ranks: expected_largest(ranks) for ranks in published} == pytest.approx(published, rel=2e-3)


@pytest.mark.parametrize("ranks", [2, 40, 10_000])
def test_drawing_agrees_with_the_integral(ranks: int) -> None:
    random = np.random.default_rng(1)
    drawn = [random.standard_normal(ranks).max() for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(expected_largest(ranks), abs=0.05)


def test_calibration_finds_the_constants_it_was_fed() -> None:
    def measured(ranks: int, size: int) -> RingTime:
        return RingTime(ranks, size, 0.003 + 2 * (ranks - 1) * 0.001 + 2 * (ranks - 1) / ranks * size / 5e6)

    links = calibrated([measured(2, 4_000_000), measured(2, 8_000_000), measured(3, 8_000_000)])
    assert links.start == pytest.approx(0.003)
    assert links.ring_hop_between == pytest.approx(0.001)
    assert links.between == pytest.approx(5e6)
    assert ring_seconds(8_000_000, 8, links) == pytest.approx(measured(8, 8_000_000).seconds)


def test_calibration_never_finds_negative_costs() -> None:
    # A third host that costs less than nothing: noise, not a hop that gives time back.
    points = [RingTime(2, 4_000_000, 0.8), RingTime(2, 8_000_000, 1.6), RingTime(3, 8_000_000, 2.1)]
    links = calibrated(points)
    assert links.ring_hop_between >= 0
    assert links.start >= 0
    assert links.between > 0


WORKLOAD = GradientTimes(
    name="two layers",
    parameters=3_000_000,
    tensors=tuple(Message(ready, 2_000_000.0) for ready in (0.3, 0.8, 1.0)),
    buckets=tuple(Message(ready, size) for ready, size in ((0.8, 5_000_000.0), (1.0, 1_000_000.0))),
)
QUIET = Assumed(sigma=0.0, negotiation_per_level=0.0, cycle=0.0, step_seconds=1.0, copy_rate=math.inf)


def test_a_prediction_counted_by_hand() -> None:
    fabric = Fabric("slow", 1, 0.0, 0.0, 0.0, 0.0, 0.0, 1e9, 20e6)
    # Backward takes 2/3 s and ends at 1. Bucket 1 is ready at 1/3 + 0.8 x 2/3 = 0.8667 and takes
    # 5e6/20e6 = 0.25: it ends at 1.1167; bucket 2 (0.05) then at 1.1667.
    assert predicted_step(WORKLOAD, fabric, 2, "ours", QUIET) == pytest.approx(1.1667, abs=1e-4)


def test_stragglers_add_their_expectation() -> None:
    assumed = Assumed(sigma=0.01, negotiation_per_level=0.0, cycle=0.0, step_seconds=1.0, copy_rate=math.inf)
    fast = Fabric("fast", 1, 0.0, 0.0, 0.0, 0.0, 0.0, 1e15, 1e15)
    found = predicted_step(WORKLOAD, fast, 256, "ours", assumed)
    assert found == pytest.approx(1 + 0.01 * expected_largest(256), rel=1e-6)


@pytest.mark.parametrize("system", ["ours", "stock"])
def test_ranks_latency_noise_and_cycles_lengthen_a_step(system: str) -> None:
    usual = Assumed(sigma=0.005, negotiation_per_level=1e-4, cycle=1e-3, step_seconds=0.05, copy_rate=1e12)
    for fabric in FABRICS.values():
        found = [predicted_step(WORKLOAD, fabric, ranks, system, usual) for ranks in (40, 256, 1024, 10_000)]
        assert found == sorted(found)
        assert all(value > usual.step_seconds for value in found)
    noisy = Assumed(sigma=0.01, negotiation_per_level=1e-4, cycle=1e-3, step_seconds=0.05, copy_rate=1e12)
    slow = Assumed(sigma=0.005, negotiation_per_level=1e-3, cycle=1e-3, step_seconds=0.05, copy_rate=1e12)
    here = FABRICS["h200-ndr"]
    base = predicted_step(WORKLOAD, here, 256, system, usual)
    assert predicted_step(WORKLOAD, here, 256, system, noisy) > base
    assert predicted_step(WORKLOAD, here, 256, system, slow) > base


def test_every_constant_has_a_source() -> None:
    names = [name for name, *_ in CONSTANTS]
    assert len(names) == len(set(names))
    assert all(source and kind in ("measured", "published", "assumed") for *_, kind, source in CONSTANTS)
    with pytest.raises(KeyError):
        constant("no such")
