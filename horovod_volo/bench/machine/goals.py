"""Goals for one H200, and which of them the recorded results reach.

Only records made on a GPU count: of each benchmark the newest, of several benchmarks the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from horovod_volo.bench.cli import Flag
from horovod_volo.bench.machine.step import PEAK_TFLOPS
from horovod_volo.bench.results import Record, read_records

_SIZES = ("volo_d1", "volo_d2", "volo_d3", "volo_d4", "volo_d5")
_SHARE = f"share of {PEAK_TFLOPS:.0f} TFLOP/s"


class Goal(NamedTuple):
    """A bound on one figure; any of several benchmarks may meet it."""

    what: str
    names: tuple[str, ...]  # of results
    label: str  # of the figure
    bound: float
    is_minimum: bool = True


def _step(model: str, side: int = 224) -> tuple[str, ...]:
    return (f"step {model} {side}", f"step {model} {side} compiled")


def _peers(model: str) -> tuple[str, ...]:
    return tuple(
        f"peers {model} bf16 {names}" for names in ("eager", "compile", "published", "eager published")
    )


GOALS = [
    *(
        Goal(f"{model} beside timm, {peer}", _peers(model), f"faster than {peer}", bound)
        for peer, bounds in (("eager", (2.4, 2.4, 2.4, 2.0, 2.0)), ("compile", (1.4, 1.4, 1.4, 1.15, 1.15)))
        for model, bound in zip(_SIZES, bounds, strict=True)
    ),
    *(
        Goal(f"{model}: {_SHARE}", _step(model), _SHARE, bound)
        for model, bound in zip(_SIZES, (35, 40, 42, 50, 53), strict=True)
    ),
    *(
        Goal(f"{model} beside the published loop", _peers(model), "faster than published", bound)
        for model, bound in (("volo_d1", 2.5), ("volo_d5", 2.1))
    ),
    *(
        Goal(
            f"outlook attention, {channels} channels, beside timm's",
            ("outlook",),
            f"{channels} channels, core forward and backward: faster than timm",
            7,
        )
        for channels in (192, 384)
    ),
    Goal("volo_d5 update, ms", ("optimizer volo_d5",), "update", 4.5, is_minimum=False),
    Goal("volo_d5 at 448 px, images a second", _step("volo_d5", 448), "images a second", 225),
    Goal("volo_d5 at 512 px, images a second", _step("volo_d5", 512), "images a second", 168),
    Goal("volo_d5, 16 times the published 62.5", _step("volo_d5"), "images a second", 16 * 62.5),
    Goal("engine beyond torch, µs a step", ("overhead",), "beyond torch", 150, is_minimum=False),
]


def goals(
    *,
    file: Annotated[str, Flag("records of benchmarks, such as docs/results.jsonl", "FILE", positional=True)],
) -> str:
    """Return one line for each goal: met, missed or not measured."""
    return summary(read_records(Path(file)))


def summary(records: Sequence[Record]) -> str:
    """Format the goals and what was measured of them."""
    on_gpu = [record for record in records if record["hardware"]["gpu"] != "none"]
    rows = [
        (goal.what, f"{'>=' if goal.is_minimum else '<='} {goal.bound:g}", *_verdict(goal, on_gpu))
        for goal in GOALS
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    met = sum(row[-1] == "met" for row in rows)
    return "\n".join([*lines, f"{met} of {len(rows)} goals are met."])


def _verdict(goal: Goal, records: Sequence[Record]) -> tuple[str, str]:
    newest = {
        record["name"]: figure["value"]
        for record in records
        if record["name"] in goal.names
        for figure in record["figures"]
        if figure["label"] == goal.label
    }
    if not newest:
        return "", "not measured"
    best = max(newest.values()) if goal.is_minimum else min(newest.values())
    met = best >= goal.bound if goal.is_minimum else best <= goal.bound
    return f"{best:.3g}", "met" if met else "missed"
