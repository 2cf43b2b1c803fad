"""Which goals for one H200 the recorded results meet: every goal, its figure, and what was found.

    python -m horovod_volo.bench.goals docs/results.jsonl

Only records made on a GPU count, the newest of each figure. Exit status 0, whether goals are met or not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from horovod_volo.bench.gpu import PEAK_TFLOPS
from horovod_volo.bench.results import Record, read_records

_SIZES = ("volo_d1", "volo_d2", "volo_d3", "volo_d4", "volo_d5")
_SHARE = f"share of {PEAK_TFLOPS:.0f} TFLOP/s"


@dataclass(frozen=True)
class Goal:
    """A bound on one figure of one benchmark; any of several benchmarks may meet it."""

    what: str
    names: tuple[str, ...]  # of results
    label: str  # of the figure
    at_least: float | None = None
    at_most: float | None = None

    def is_met_by(self, value: float) -> bool:
        """Say whether a value is within the bound."""
        above = self.at_least is None or value >= self.at_least
        return above and (self.at_most is None or value <= self.at_most)

    @property
    def bound(self) -> str:
        """Word the bound."""
        return f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"


def _forms(model: str, side: int = 224) -> tuple[str, ...]:
    return (f"gpu {model} {side}", f"gpu {model} {side} compiled")


def _peers(model: str) -> tuple[str, ...]:
    beside = ("eager", "compile", "published", "eager published")
    return tuple(f"peers {model} bf16 {forms}" for forms in beside)


def _beside(form: str, bounds: Sequence[float]) -> list[Goal]:
    return [
        Goal(f"{model} beside timm, {form}", _peers(model), f"faster than {form}", at_least=bound)
        for model, bound in zip(_SIZES, bounds, strict=True)
    ]


GOALS = [
    *_beside("eager", (2.4, 2.4, 2.4, 2.0, 2.0)),
    *_beside("compile", (1.4, 1.4, 1.4, 1.15, 1.15)),
    *(
        Goal(f"{model}: {_SHARE}", _forms(model), _SHARE, at_least=bound)
        for model, bound in zip(_SIZES, (35, 40, 42, 50, 53), strict=True)
    ),
    *(
        Goal(
            f"{model} beside the published loop",
            _peers(model),
            "faster than published",
            at_least=bound,
        )
        for model, bound in (("volo_d1", 2.5), ("volo_d5", 2.1))
    ),
    *(
        Goal(
            f"outlook attention, {channels} channels, beside timm's",
            ("outlook",),
            f"{channels} channels, core forward and backward: faster than timm",
            at_least=7,
        )
        for channels in (192, 384)
    ),
    Goal("volo_d5 update, ms", ("optimizer volo_d5",), "update", at_most=4.5),
    Goal("volo_d5 at 448 px, images a second", _forms("volo_d5", 448), "images a second", at_least=225),
    Goal("volo_d5 at 512 px, images a second", _forms("volo_d5", 512), "images a second", at_least=168),
    Goal("volo_d5, 16 times the published 62.5", _forms("volo_d5"), "images a second", at_least=16 * 62.5),
    Goal("engine beyond torch, µs a step", ("overhead",), "beyond torch", at_most=150),
]


def summary(records: Sequence[Record]) -> str:
    """Word all goals, one a line: met, missed or not measured."""
    on_gpu = [record for record in records if record["hardware"]["gpu"] != "none"]
    rows = [(goal.what, goal.bound, *_verdict(goal, on_gpu)) for goal in GOALS]
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
    best = min(newest.values()) if goal.at_least is None else max(newest.values())
    return f"{best:.3g}", "met" if goal.is_met_by(best) else "missed"


if __name__ == "__main__":
    print(summary(read_records(Path(sys.argv[1]))))
