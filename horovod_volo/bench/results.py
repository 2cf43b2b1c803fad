"""The result of a benchmark, the file that keeps it with its provenance, and how it is printed.

A line of docs/results.jsonl is one record and is never changed: a newer record of the same name takes its
place in the tables of README.md and docs/results.md.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch

from horovod_volo.bench.cli import Flag
from horovod_volo.bench.comparison import Estimate, estimate
from horovod_volo.core.environment import code_commit
from horovod_volo.core.errors import UserError

RESULTS = Path(__file__).parents[2] / "docs" / "results.jsonl"
# Labels of the figures in the README; docs/results.md has all figures.
HEADLINES = (
    "192 channels, core forward: faster than timm",
    "192 channels, core forward and backward: faster than timm",
    "1,000 classes, batch 8: faster than published",
    "1,000 classes, batch 8: less memory than published",
    "1,000 classes, batch 64: faster than published",
    "21,841 classes, batch 8: faster than published",
    "21,841 classes, batch 8: less memory than published",
    "faster than timm's defaults",
    "faster than timm's best",
    "update beside 50 bytes a parameter at that speed",
    "beyond torch",
    "faster than eager",
    "faster than channels-last",
    "faster than published",
    "21,841 classes: time beside 1,000",
    "efficiency against no exchange",
    "exposed, as a share of stock Horovod's",
    "exposed, as a share of torch DDP's",
    "our messages a step",
    "hidden of our exchange",
    "2 hosts of 200 Mbit/s, 8 MiB: ring faster",
    "4 hosts of 200 Mbit/s, 8 MiB: ring faster",
    "8 hosts of 200 Mbit/s, 8 MiB: ring faster",
    "largest error of the ring's predictions, up to 4 hosts",
    "largest error of the ring's predictions",
    "8 x H200, 8 x NDR400, volo_d1, 256 ranks: ours",
    "8 x H200, 8 x NDR400, volo_d5, 256 ranks: ours",
    "faster than torch.load",
    "faster than timm's",
    "resident memory of an image",
    "images a second and thread",
    "less CPU than Pillow",
    "faster than timm's loader",
    "images a second",
    "share of 790 TFLOP/s",
)

_HEAD = ("Measured", "Value", "On", "With", "At")
_PER_SECOND = {"s": 1.0, "ms": 1e3, "µs": 1e6}

Record = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One number; of repeated measurements with the 95 % interval of their median or mean."""

    label: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, label: str, samples: Sequence[float], unit: str) -> Figure:
        """Return the median of repeated measurements."""
        return cls.of_estimate(label, estimate(samples), unit)

    @classmethod
    def of_seconds(cls, label: str, seconds: Iterable[float], unit: str = "ms") -> Figure:
        """Return the median of times, converted from seconds."""
        return cls.of(label, [_PER_SECOND[unit] * value for value in seconds], unit)

    @classmethod
    def of_rate(cls, label: str, seconds: Iterable[float], images: float = 1) -> Figure:
        """Return the median of images per second, from the seconds that `images` images took."""
        return cls.of(label, [images / value for value in seconds], "images/s")

    @classmethod
    def of_estimate(cls, label: str, found: Estimate, unit: str) -> Figure:
        """Return an estimate with its interval."""
        return cls(label, found.value, unit, found.low, found.high)


@dataclass(frozen=True)
class Result:
    """What one benchmark measured; the newest result of a name is the one that is shown."""

    name: str
    title: str
    figures: list[Figure]


def record_of(result: Result, command: str, load: Sequence[float]) -> Record:
    """Add to a result its date, commit, hardware, system load and command."""
    return {
        "name": result.name,
        "title": result.title,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": code_commit(),
        "hardware": _hardware(),
        "load": [round(value, 2) for value in load],  # runnable processes before and after
        "command": command,
        "figures": [asdict(figure) for figure in result.figures],
    }


def append(record: Record, path: Path = RESULTS) -> None:
    """Append a record to the results."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}. Record from a checkout of the project."
        ) from None


def read_records(path: Path = RESULTS) -> list[Record]:
    """Read all records, oldest first; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _hardware() -> dict[str, str | int]:
    gpus = torch.cuda.device_count()
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "none",
    }


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def lines(record: Record) -> str:
    """Format one record for the terminal."""
    width = max(len(figure["label"]) for figure in record["figures"])
    rows = [f"  {figure['label']:<{width}}  {_value(figure)}" for figure in record["figures"]]
    before, after = record["load"]
    last = f"  on {_shown_hardware(record)}; load {before} to {after}"
    return "\n".join([f"{record['name']}: {record['title']}", *rows, last])


def table(
    *, headlines: Annotated[bool, Flag("only the figures of the README, which is shorter")] = False
) -> str:
    """Format the recorded results as Markdown."""
    return markdown(read_records(), HEADLINES if headlines else ())


def markdown(records: list[Record], labels: Sequence[str] = ()) -> str:
    """Format the newest record of each name as a Markdown table, one row per figure, sorted by name.

    With `labels`, only the figures that have one of them.
    """
    if not records:
        return ""
    newest = {record["name"]: record for record in records}
    rows = [_HEAD, ("---",) * len(_HEAD)]
    for _, record in sorted(newest.items()):
        provenance = (
            _shown_hardware(record),
            f"`{record['command']}`",
            f"{record['commit']}, {record['date']}",
        )
        rows.append((f"**{record['name']}**: {record['title']}", "", *provenance))
        shown = [figure for figure in record["figures"] if not labels or figure["label"] in labels]
        rows += [(figure["label"], _value(figure), "", "", "") for figure in shown]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown_hardware(record: Record) -> str:
    where = record["hardware"]
    gpu = "" if where["gpu"] == "none" else f"{where['gpu']}, "
    return f"{gpu}{where['cpu']}, cores: {where['cores']}, compute threads a rank: {where['threads']}"


def _value(figure: dict[str, Any]) -> str:
    interval = ""
    if figure["low"] is not None:
        interval = f" ({_number(figure['low'])} to {_number(figure['high'])})"
    return f"{_number(figure['value'])} {figure['unit']}{interval}".rstrip()


def _number(value: float) -> str:
    """Format counts in full, other numbers with three significant digits and without exponent."""
    if abs(value) >= 100 or isinstance(value, int):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
