"""Goals for one H200, and which of them the recorded results reach.

Only records made on a GPU count: of each benchmark the newest, of several benchmarks the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, NamedTuple

from horovod_volo.bench.cli import Flag
from horovod_volo.bench.machine.step import OF_PEAK
from horovod_volo.bench.results import Record, read_records


class Goal(NamedTuple):
    """A bound on one figure."""

    names: str  # of results, as a shell pattern: any of them may meet it
    label: str  # of the figure
    relation: str
    bound: float
    unit: str = "x"


GOALS = (
    *(Goal(f"peers volo_d{size} bf16*", "faster than eager", ">=", 2.4) for size in (1, 2, 3)),
    *(Goal(f"peers volo_d{size} bf16*", "faster than eager", ">=", 2.0) for size in (4, 5)),
    *(Goal(f"peers volo_d{size} bf16*", "faster than compile", ">=", 1.4) for size in (1, 2, 3)),
    *(Goal(f"peers volo_d{size} bf16*", "faster than compile", ">=", 1.15) for size in (4, 5)),
    Goal("peers volo_d1 bf16*", "faster than published", ">=", 2.5),
    Goal("peers volo_d5 bf16*", "faster than published", ">=", 2.1),
    *(
        Goal(f"step volo_d{size} 224*", OF_PEAK, ">=", bound, "%")
        for size, bound in ((1, 35), (2, 40), (3, 42), (4, 50), (5, 53))
    ),
    Goal("step volo_d5 224*", "images a second", ">=", 16 * 62.5, "images/s"),  # 16 times the published speed
    Goal("step volo_d5 448*", "images a second", ">=", 225, "images/s"),
    Goal("step volo_d5 512*", "images a second", ">=", 168, "images/s"),
    *(
        Goal("outlook", f"{channels} channels, core forward and backward: faster than timm", ">=", 7)
        for channels in (192, 384)
    ),
    Goal("optimizer volo_d5", "update", "<=", 4.5, "ms"),
    Goal("overhead", "beyond torch", "<=", 150, "µs"),
)


def goals(*, file: Annotated[str, Flag("records, such as docs/results.jsonl", positional=True)]) -> str:
    """Return one line for each goal: met, missed or not measured."""
    return summary(read_records(Path(file)))


def summary(records: Sequence[Record]) -> str:
    """Format the goals and what was measured of them."""
    on_gpu = [record for record in records if record["hardware"]["gpu"] != "none"]
    rows = [(f"{goal.names}: {goal.label}", goal, *_verdict(goal, on_gpu)) for goal in GOALS]
    width = max(len(what) for what, *_ in rows)
    lines = [
        f"{what:<{width}}  {goal.relation} {f'{goal.bound:g} {goal.unit}':<13}  {best:<5}  {verdict}"
        for what, goal, best, verdict in rows
    ]
    met = sum(verdict == "met" for *_, verdict in rows)
    return "\n".join([*lines, f"{met} of {len(rows)} goals are met."])


def _verdict(goal: Goal, records: Sequence[Record]) -> tuple[str, str]:
    newest = {
        record["name"]: figure["value"]
        for record in records
        if fnmatch(record["name"], goal.names)
        for figure in record["figures"]
        if figure["label"] == goal.label
    }
    if not newest:
        return "", "not measured"
    best = max(newest.values()) if goal.relation == ">=" else min(newest.values())
    met = best >= goal.bound if goal.relation == ">=" else best <= goal.bound
    return f"{best:.3g}", "met" if met else "missed"
