"""Results as people read them: lines on the terminal, and the Markdown table of the README."""

from __future__ import annotations

from typing import Any

from horovod_volo.bench.results import Record

_HEAD = ("Measured", "Value", "On", "With", "At")


def lines(record: Record) -> str:
    """Word one result for the terminal."""
    width = max(len(figure["label"]) for figure in record["figures"])
    rows = [f"  {figure['label']:<{width}}  {_value(figure)}" for figure in record["figures"]]
    before, after = record["load"]
    return "\n".join(
        [f"{record['name']}: {record['title']}", *rows, f"  on {_hardware(record)}; load {before} to {after}"]
    )


def markdown(records: list[Record]) -> str:
    """Put the newest result of each name into a Markdown table, a row a figure, in the order of names."""
    if not records:
        return ""
    newest = {record["name"]: record for record in records}
    rows = [_HEAD, ("---",) * len(_HEAD)]
    for _, record in sorted(newest.items()):
        rows.append((f"**{record['name']}**: {record['title']}", "", *_provenance(record)))
        rows += [(figure["label"], _value(figure), "", "", "") for figure in record["figures"]]
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
