"""What is measured on a GPU, as far as it can be tested without one: the plan, the counts, the goals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from horovod_volo.bench import __main__ as command_line
from horovod_volo.bench import comparison
from horovod_volo.bench.comparison import WrongResultError
from horovod_volo.bench.machine import ceilings, goals, gpu, peers, profiled_step, step
from horovod_volo.bench.synthetic import forward_flops
from horovod_volo.cluster.resources import RankResources
from horovod_volo.core.errors import UserError

# Forward and backward of one image, in units of 10^9 operations, counted layer by layer.
TRAIN_GFLOP = {
    ("volo_d1", 224): 41.5,
    ("volo_d2", 224): 85.8,
    ("volo_d3", 224): 124.4,
    ("volo_d4", 224): 265.6,
    ("volo_d5", 224): 433.8,
    ("volo_d5", 448): 1888.0,
    ("volo_d5", 512): 2547.0,
}
TINY: dict[str, Any] = {
    "model": "volo_demo",
    "img_size": 32,
    "batch_size": 2,
    "precision": "fp32",
    "drop_path": 0.1,
    "pairs": 3,
}


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks short, and leave torch's threads as they are."""
    monkeypatch.setattr(comparison, "BLOCK_SECONDS", 0.01)
    resources = RankResources(device=torch.device("cpu"), threads=1, binding="test")
    monkeypatch.setattr("horovod_volo.bench.synthetic.rank_resources", lambda world: resources)


def planned() -> list[command_line.BenchRequest]:
    return [command_line.parse(words.split()) for lines in gpu.PARTS.values() for _, words in lines]


def results_of_the_plan() -> Iterator[tuple[str, str]]:
    """Yield the name of each result that the plan records, with one figure's label, or any."""
    for chosen in planned():
        given = chosen.settings
        if chosen.name == "step":
            form = " compiled" if given["compile"] else " plain" if given["kernels"] == "plain" else ""
            yield f"step {given['model']} {given['img_size']}{form}", "*"
        elif chosen.name == "peers":
            name = f"peers {given['model']} {given['precision']} {' '.join(given['against'])}"
            yield from ((name, f"faster than {form}") for form in given["against"])
        else:
            yield f"{chosen.name} {given['model']}" if "model" in given else chosen.name, "*"


def test_every_part_takes_less_than_eight_minutes() -> None:
    assert len(planned()) > 15
    assert all(sum(limit for limit, _ in lines) <= 480 for lines in gpu.PARTS.values())


def test_every_goal_is_measured_by_the_plan() -> None:
    results = set(results_of_the_plan())
    for goal in goals.GOALS:
        assert any(fnmatch(name, goal.names) and label in (goal.label, "*") for name, label in results), goal


def test_without_a_gpu_nothing_is_done(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="PyTorch sees no GPU here"):
        gpu.measure(parts=["d1"], out=str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"There is no part d7\. The parts are ceilings, d1"):
        gpu.measure(parts=["d7"], out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_ceilings_of_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_COPIED", 2**12)
    monkeypatch.setattr(ceilings, "_PRODUCTS", ((8, 4, 6),))
    monkeypatch.setattr(ceilings, "_ATTENTION", {"D1": (1, 2, 4, 8)})
    figures = ceilings.measure().figures
    products = [f"8 x 4 x 6, {name}" for name in ("forward", "gradient of tokens", "gradient of weights")]
    attention = [f"attention of D1, forward and backward, {backend.name}" for backend in ceilings._BACKENDS]
    labels = [figure.label for figure in figures]
    assert labels[:4] == ["copy", *products]
    assert labels[4:]  # this device has one of the backends
    assert set(labels[4:]) <= set(attention)
    assert all(figure.value > 0 for figure in figures)


def test_operators_of_a_step_are_listed_and_traced(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    table = profiled_step.measure(model="volo_demo", img_size=32, batch_size=2, trace=str(trace))
    assert "aten::addmm" in table
    assert json.loads(trace.read_text())["traceEvents"]


def test_a_failure_does_not_stop_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lines = [(60, "overhead --pairs 1"), (60, "overhead --pairs 2"), (1, "overhead --pairs 90")]
    monkeypatch.setattr(gpu, "PARTS", {"few": lines})
    with pytest.raises(UserError, match="2 benchmarks failed"):
        gpu.measure(parts=["few"], out=str(tmp_path))
    printed = capsys.readouterr().out
    assert "failed with status 2  overhead --pairs 1" in printed
    assert "measured  overhead --pairs 2" in printed
    assert "took too long  overhead --pairs 90" in printed
    (record,) = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert record["name"] == "overhead"
    assert "one pair has no spread" in (tmp_path / "log.txt").read_text()
    lines.pop()
    with pytest.raises(UserError, match="1 benchmarks failed"):  # continues with what is not measured yet
        gpu.measure(parts=["few"], out=str(tmp_path))
    assert "--pairs 2" not in capsys.readouterr().out


@pytest.mark.parametrize(("model", "side"), TRAIN_GFLOP)
def test_the_counted_operations_are_those_of_the_network(model: str, side: int) -> None:
    assert TRAIN_GFLOP[model, side] == pytest.approx(3e-9 * forward_flops(model, side), rel=0.01)


def test_the_percentage_of_the_peak() -> None:
    assert float(step.percent_of_peak("volo_d5", 224, [1000.0])[0]) == pytest.approx(54.9, abs=0.05)


def test_other_losses_of_compiled_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(model: nn.Module) -> None:
        nn.init.zeros_(model.head.weight)

    monkeypatch.setattr("horovod_volo.engine.state.compile_blocks", spoil)
    with pytest.raises(WrongResultError, match="with blocks compiled and without"):
        step.measure(**TINY, compile=True)


def test_overhead_reports_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {figure.label: figure.value for figure in peers.measure_overhead(batch_size=2, pairs=3).figures}
    assert list(figures) == ["engine's step", "bare loop", "beyond torch"]
    assert min(figures["engine's step"], figures["bare loop"]) > 0
    monkeypatch.setattr(peers.SyntheticRun, "step", lambda run: None)
    with pytest.raises(WrongResultError, match="weights after 20 steps"):
        peers.measure_overhead(batch_size=2, pairs=3)


def record(name: str, label: str, value: float, gpu: str = "1 x NVIDIA H200") -> dict[str, Any]:
    return {"name": name, "hardware": {"gpu": gpu}, "figures": [{"label": label, "value": value}]}


def verdicts(*records: dict[str, Any]) -> dict[str, list[str]]:
    """Return the columns of each goal by its first, and the last line by nothing."""
    *lines, last = goals.summary(records).splitlines()
    columns = [re.split(r"\s{2,}", line) for line in lines]
    return {first: rest for first, *rest in columns} | {"": [last]}


def test_goals_are_met_missed_or_not_measured() -> None:
    speed = "images a second"
    found = verdicts(
        record("step volo_d5 448", speed, 300),
        record("step volo_d5 448", speed, 220),
        record("step volo_d5 448 compiled", speed, 230),
        record("step volo_d5 512", speed, 167),
        record("step volo_d5 224", speed, 2000, gpu="none"),
        record("optimizer volo_d5", "update", 4.4),
        record("overhead", "beyond torch", 160.0),
    )
    assert found["step volo_d5 448*: images a second"][-2:] == ["230", "met"]
    assert found["step volo_d5 512*: images a second"][-2:] == ["167", "missed"]
    assert found["step volo_d5 224*: images a second"][-1] == "not measured"
    assert found["optimizer volo_d5: update"][-1] == "met"
    assert found["overhead: beyond torch"][-1] == "missed"
    assert found[""] == [f"2 of {len(goals.GOALS)} goals are met."]
