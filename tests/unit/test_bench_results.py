"""The flags of benchmarks, the statistics of paired measurements, how results are kept, the simulator."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from horovod_volo.bench import __main__ as command_line
from horovod_volo.bench.comparison import PairedTimes, WrongResultError, alternate, assert_agree
from horovod_volo.bench.results import Figure, Result, append, lines, markdown, read_records, record_of
from horovod_volo.bench.simulate import (
    FABRICS,
    Fabric,
    GradientTimes,
    Message,
    all_reduce_seconds,
    end_of_exchange,
    expected_largest,
    measured_gradient_times,
    predicted_step,
)
from horovod_volo.core.errors import UserError


def test_sides_take_turns_in_being_first() -> None:
    calls: list[str] = []

    def block(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    result = alternate(lambda: block("a"), lambda: block("b"), pairs=4)
    assert "".join(calls) == "abbaabba"
    assert [times.tolist() for times in result] == [[1, 4, 5, 8], [2, 3, 6, 7]]


def test_the_ratio_is_the_median_of_pairs_not_of_sides() -> None:
    # A slow moment hits the second pair; the sides' medians would give 4 / 1.
    times = PairedTimes(ours=np.array([1.0, 10.0, 1.0]), peer=np.array([2.0, 20.0, 4.0]))
    found = Figure.of("", times.ratios, "x")
    assert found.value == 2.0
    assert (found.low, found.high) == (2.0, 4.0)
    # The median of five drawn again is an end of them with a probability of 5.8 %.
    found = Figure.of("", [1.0, 2.0, 3.0, 4.0, 100.0], "x")
    assert (found.value, found.low, found.high) == (3.0, 1.0, 100.0)


def test_values_that_differ_are_refused() -> None:
    peer = torch.tensor([100.0, 0.0])
    assert_agree("sum", torch.tensor([100.0, 0.9]), peer, 0.01)
    for wrong in (1.1, float("nan"), float("inf")):
        with pytest.raises(WrongResultError, match=r"sum: .* Nothing was measured"):
            assert_agree("sum", torch.tensor([100.0, wrong]), peer, 0.01)


FIGURES = [Figure("whole step", 1234.5, "ms", 12.34, 2000.0), Figure("memory", 0.5, "x")]


def record(name: str = "step volo_d1", commit: str = "abc") -> dict[str, Any]:
    result = Result(name, "training step", FIGURES)
    return record_of(result, "python -m horovod_volo.bench step", load=(0.123, 2.0)) | {"commit": commit}


def test_records_are_appended_with_what_produced_them(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert read_records(path) == []
    for commit in ("old", "new"):
        append(record(commit=commit), path)
    assert read_records(path) == [record(commit="old"), record(commit="new")]
    made = read_records(path)[0]
    assert made["load"] == [0.12, 2.0]
    assert made["hardware"]["cores"] > 0
    with pytest.raises(UserError, match="Record from a checkout"):
        append(record(), tmp_path / "nowhere" / "results.jsonl")


def test_the_table_shows_the_newest_of_each_name() -> None:
    rows = markdown([record("step"), record("loss"), record("step", commit="newer")]).splitlines()
    table = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in table[2::3]] == ["**loss**: training step", "**step**: training step"]
    assert [row[4].split(",")[0] for row in table[2::3]] == ["abc", "newer"]
    figures = [["whole step", "1,234 ms (12.3 to 2,000)"], ["memory", "0.50 x"]]
    assert [row[:2] for row in table[3:5]] == [row[:2] for row in table[6:8]] == figures
    assert "  memory      0.50 x" in lines(record()).splitlines()


# Four ranks a host; a thousand bytes a second between hosts, four thousand inside, hops of 1 and 10 ms.
LAN = Fabric("lan", 4000.0, 1000.0, 4, 0.5, 0.001, 0.01, 0.002, 0.02)
WORKLOAD = GradientTimes(3_000_000, (Message(0.8, 5_000_000.0), Message(1.0, 1_000_000.0)))


def ring_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    return all_reduce_seconds(size, ranks, fabric._replace(tree_hop_inside=1.0, tree_hop_between=1.0))


def tree_seconds(size: float, ranks: int, fabric: Fabric) -> float:
    return all_reduce_seconds(size, ranks, fabric._replace(ring_hop_inside=1.0, ring_hop_between=1.0))


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
    words = "simulate --models volo_d1 --fabrics h200-ndr --img-size 32 --ranks 8 256"
    assert command_line.main([*words.split(), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["command"] == f"python -m horovod_volo.bench {words}"
    few, many = (figure["value"] for figure in record["figures"])
    assert 80 < many < few < 100
