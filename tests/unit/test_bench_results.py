"""The flags of benchmarks, the statistics of paired measurements, and how results are kept and shown."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from math import comb
from pathlib import Path
from time import sleep
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

from horovod_volo.bench import comparison as module
from horovod_volo.bench.__main__ import parse
from horovod_volo.bench.comparison import PairedTimes, WrongResultError, alternate, assert_agree
from horovod_volo.bench.results import (
    Figure,
    Flag,
    Result,
    add_flags,
    append,
    lines,
    markdown,
    read_records,
    record_of,
)
from horovod_volo.core.errors import UserError


def example(
    *,
    folder: Annotated[str, Flag("where")],
    sides: Annotated[Sequence[int], Flag("sides in pixels")] = (8, 16),
    against: Annotated[Sequence[Literal["a", "b"]], Flag("peers", may_be_empty=True)] = ("a",),
    rate: Annotated[float, Flag("rate in images a second")] = 0.5,
    compile: Annotated[bool, Flag("compile it")] = False,
) -> None:
    """Stand for a benchmark."""


def test_a_signature_declares_its_flags() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, example)
    found = vars(parser.parse_args(["here"]))
    assert found == {"folder": "here", "sides": (8, 16), "against": ("a",), "rate": 0.5, "compile": False}
    words = ["here", "--sides", "1", "2", "--against", "--rate", "2", "--compile"]
    found = vars(parser.parse_args(words))
    assert found == {"folder": "here", "sides": [1, 2], "against": [], "rate": 2.0, "compile": True}
    assert "sides in pixels (default: 8 16)" in " ".join(parser.format_help().split())


def test_recorded_commands_are_understood() -> None:
    """Those of documents are parsed by tests/style/test_documents.py."""
    for record in read_records():
        words = shlex.split(record["command"])
        parse(words[words.index("horovod_volo.bench") + 1 :])


CPU = torch.device("cpu")


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


def exact_interval(samples: list[float]) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % points of a resampled median, from binomial probabilities."""
    ordered, size = sorted(samples), len(samples)
    majority = size // 2 + 1

    def at_most(rank: int) -> float:
        """Return the probability that the median of a resampling is among the `rank` smallest."""
        p = rank / size
        return sum(comb(size, n) * p**n * (1 - p) ** (size - n) for n in range(majority, size + 1))

    low = next(value for rank, value in enumerate(ordered, 1) if at_most(rank) > 0.025)
    high = next(value for rank, value in enumerate(ordered, 1) if at_most(rank) > 0.975)
    return low, high


@pytest.mark.parametrize("size", [3, 7, 11, 13, 25])
def test_the_interval_is_the_exact_one(size: int) -> None:
    samples = list(np.random.default_rng(size).permutation(np.arange(size) ** 1.5))
    found = Figure.of("", samples, "x")
    assert found.value == sorted(samples)[size // 2]
    assert (found.low, found.high) == exact_interval(samples)
    assert Figure.of("", samples, "x") == found


def test_a_block_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_SECONDS", 0.1)
    assert 2 <= module.repeats_for(module.timed(lambda: sleep(0.02), 1, CPU)) <= 5
    assert module.repeats_for(module.timed(lambda: sleep(0.2), 1, CPU)) == 1


def test_values_that_differ_are_refused() -> None:
    peer = torch.tensor([100.0, 0.0])
    assert_agree("sum", torch.tensor([100.0, 0.9]), peer, 0.01)
    for wrong in (1.1, float("nan"), float("inf")):
        with pytest.raises(WrongResultError, match=r"sum: .* Nothing was measured"):
            assert_agree("sum", torch.tensor([100.0, wrong]), peer, 0.01)


def test_peak_memory_counts_what_is_there_at_one_moment() -> None:
    def action() -> None:
        for _ in range(3):
            first = torch.ones(1000)
            second = first + 1
            del first
            del second

    assert 8000 <= module.peak_extra_bytes(action, CPU) < 8100  # beside two tensors, a few scalars


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
    assert list(made) == ["name", "title", "date", "commit", "hardware", "load", "command", "figures"]
    assert made["load"] == [0.12, 2.0]
    assert made["hardware"]["cores"] > 0
    assert json.loads(json.dumps(made)) == made
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
