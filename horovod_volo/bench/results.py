"""The flags of a benchmark, its result, the file that keeps it with its provenance, and how it is printed.

`measure` of a benchmark declares its flags: `batch_size: Annotated[int, Flag("images per rank")] = 8` is
`--batch-size N` with the help "images per rank (default: 8)". A Literal gives choices, a sequence takes
several values, a bool is a switch; a parameter without a default is positional. A line of docs/results.jsonl
is one record and is never changed: a newer one of the same name takes its place in docs/results.md.
"""

import argparse
import inspect
import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.config.arguments import whole_number
from horovod_volo.core.environment import code_commit
from horovod_volo.core.errors import UserError

RESULTS = Path(__file__).parents[2] / "docs" / "results.jsonl"
_RESAMPLINGS = 10_000

Record = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One number; of repeated measurements with the 95 % interval of their median."""

    label: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, label: str, samples: Sequence[float] | NDArray[np.float64], unit: str) -> "Figure":
        """Return the median of repeated measurements with its bootstrap interval."""
        drawn = np.random.default_rng(0).choice(samples, size=(_RESAMPLINGS, len(samples)))
        low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
        return cls(label, float(np.median(samples)), unit, float(low), float(high))


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
    processor = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M)
    return {
        "cpu": processor[1] if processor else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "none",
    }


def lines(record: Record) -> str:
    """Format one record for the terminal."""
    width = max(len(figure["label"]) for figure in record["figures"])
    rows = [f"  {figure['label']:<{width}}  {_shown(figure)}" for figure in record["figures"]]
    before, after = record["load"]
    last = f"  on {_shown_hardware(record)}; load {before} to {after}"
    return "\n".join([f"{record['name']}: {record['title']}", *rows, last])


def table() -> str:
    """Format the recorded results as Markdown."""
    return markdown(read_records())


def markdown(records: list[Record]) -> str:
    """Format the newest record of each name as a Markdown table, sorted by name."""
    newest = {record["name"]: record for record in records}
    rows = [("Measured", "Value", "On", "With", "At"), ("---",) * 5]
    for _, record in sorted(newest.items()):
        title, at = f"**{record['name']}**: {record['title']}", f"{record['commit']}, {record['date']}"
        rows.append((title, "", _shown_hardware(record), f"`{record['command']}`", at))
        rows += [(figure["label"], _shown(figure), "", "", "") for figure in record["figures"]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown_hardware(record: Record) -> str:
    where = record["hardware"]
    gpu = "" if where["gpu"] == "none" else f"{where['gpu']}, "
    return f"{gpu}{where['cpu']}, cores: {where['cores']}, compute threads a rank: {where['threads']}"


def _shown(figure: dict[str, Any]) -> str:
    interval = ""
    if figure["low"] is not None:
        interval = f" ({_number(figure['low'])} to {_number(figure['high'])})"
    return f"{_number(figure['value'])} {figure['unit']}{interval}".rstrip()


def _number(value: float) -> str:
    """Format counts in full, other numbers with three significant digits and without exponent."""
    if abs(value) >= 100 or isinstance(value, int):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


@dataclass(frozen=True)
class Flag:
    """What the command line needs to know about a parameter beyond its name, type and default."""

    help: str
    read: Callable[[str], object] | None = None  # instead of the type, where not every value is allowed
    may_be_empty: bool = False  # of a sequence


ModelName = Annotated[str, Flag("VOLO size, or any model that the trainer builds")]
ImgSize = Annotated[int, Flag("side of the square input images, in pixels")]
BatchSize = Annotated[int, Flag("images per rank and step")]
DropPath = Annotated[float, Flag("largest drop path rate (stochastic depth)")]
Pairs = Annotated[
    int, Flag("timed blocks of each side", read=whole_number(2, because=": one pair has no spread"))
]


def add_flags(parser: argparse.ArgumentParser, function: Callable[..., object]) -> None:
    """Add a flag for each parameter of a benchmark, and those of its record if it returns a Result."""
    hints = get_type_hints(function, include_extras=True)
    if hints["return"] is Result:
        parser.add_argument("--json", action="store_true", help="print the record as one JSON object")
        parser.add_argument("--record", action="store_true", help="append the record to docs/results.jsonl")
    for name, parameter in inspect.signature(function).parameters.items():
        kind, flag = get_args(hints[name])
        options: dict[str, Any] = {"help": flag.help}
        has_default = parameter.default is not parameter.empty
        if has_default:
            options = {"help": flag.help + _shown_default(parameter.default), "default": parameter.default}
        if get_origin(kind) is Sequence:
            options["nargs"] = "*" if flag.may_be_empty else "+"
            (kind,) = get_args(kind)
        if kind is bool:
            options["action"] = "store_true"
        elif get_origin(kind) is Literal:
            options["choices"] = get_args(kind)
        else:
            options |= {"type": flag.read or kind, "metavar": "N" if kind is int else name.upper()}
        parser.add_argument(f"--{name.replace('_', '-')}" if has_default else name, **options)


def _shown_default(default: object) -> str:
    if default is False or default == "":
        return ""
    return f" (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"
