"""Results as people read them: lines on the terminal, and the Markdown table of the README."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_volo.bench.results import Record

# What the README tells; docs/results.md tells all.
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


def lines(record: Record) -> str:
    """Word one result for the terminal."""
    width = max(len(figure["label"]) for figure in record["figures"])
    rows = [f"  {figure['label']:<{width}}  {_value(figure)}" for figure in record["figures"]]
    before, after = record["load"]
    return "\n".join(
        [f"{record['name']}: {record['title']}", *rows, f"  on {_hardware(record)}; load {before} to {after}"]
    )


def markdown(records: list[Record], labels: Sequence[str] = ()) -> str:
    """Put the newest result of each name into a Markdown table, a row a figure, in the order of names.

    With `labels`, only figures that are called so.
    """
    if not records:
        return ""
    newest = {record["name"]: record for record in records}
    rows = [_HEAD, ("---",) * len(_HEAD)]
    for _, record in sorted(newest.items()):
        rows.append((f"**{record['name']}**: {record['title']}", "", *_provenance(record)))
        told = [figure for figure in record["figures"] if not labels or figure["label"] in labels]
        rows += [(figure["label"], _value(figure), "", "", "") for figure in told]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _provenance(record: Record) -> tuple[str, str, str]:
    return _hardware(record), f"`{record['command']}`", f"{record['commit']}, {record['date']}"


def _hardware(record: Record) -> str:
    where = record["hardware"]
    gpu = "" if where["gpu"] == "none" else f"{where['gpu']}, "
    return f"{gpu}{where['cpu']}, cores: {where['cores']}, compute threads a rank: {where['threads']}"


def _value(figure: dict[str, Any]) -> str:
    interval = ""
    if figure["low"] is not None:
        interval = f" ({_number(figure['low'])} to {_number(figure['high'])})"
    return f"{_number(figure['value'])} {figure['unit']}{interval}".rstrip()


def _number(value: float) -> str:
    """Write a count in full, else three significant digits and no exponent."""
    if abs(value) >= 100 or isinstance(value, int):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
