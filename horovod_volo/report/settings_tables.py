"""The environment and the recipe of runs as tables: first what differs, then everything, folded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from horovod_volo.config.values import all_settings, shown
from horovod_volo.core.errors import escape_controls
from horovod_volo.report.markup import Markup, element, folded, joined, table
from horovod_volo.report.run_files import RunFiles

_NOT_RECORDED = "not recorded"
Row = tuple[str, list[str]]  # what, and its value in each run


def environment(runs: Sequence[RunFiles]) -> Markup:
    """Return versions, hosts and what each rank is bound to."""
    rows: list[Row] = [
        ("Code", [str(run.environment.get("commit", _NOT_RECORDED)) for run in runs]),
        ("Python", [str(run.environment.get("python", _NOT_RECORDED)) for run in runs]),
    ]
    packages = [_table_of(run.environment.get("packages")) for run in runs]
    names = dict.fromkeys(name for of_run in packages for name in of_run)
    rows += [(name, [str(of_run.get(name, _NOT_RECORDED)) for of_run in packages]) for name in names]
    rows.append(("Hosts", [_counted(run.hosts) for run in runs]))
    rows.append(("World", [run.banner.get("world", _NOT_RECORDED) for run in runs]))
    bindings = [_bindings(run) for run in runs]
    parts = [_beside(runs, rows, "Versions and hosts")]
    if any(bindings):
        parts.append(folded("Ranks and what they are bound to", *bindings))
    return joined(parts)


def recipe(runs: Sequence[RunFiles]) -> Markup:
    """Return the settings that differ: between the runs, and from the defaults; and all of them, folded."""
    defaults = {(setting.group, setting.name): setting.default for setting in all_settings()}
    names = list(dict.fromkeys([*defaults, *(key for run in runs for key in _keys(run))]))
    changed: list[Row] = []
    between: list[Row] = []
    for key in names:
        values = [_written(run.setting(*key)) for run in runs]
        default = _written(defaults[key]) if key in defaults else "not a setting of this version"
        row = [default, *values]
        if key == ("run", "name"):
            continue  # it heads the column
        if len(set(values)) > 1:
            between.append((".".join(key), row))
        elif any(value not in (default, "") for value in values):
            changed.append((".".join(key), row))
    head = ["Setting", "Default", *(run.name for run in runs)]
    parts = []
    for rows, caption in (
        (between, "What differs between the runs"),
        (changed, "What differs from the defaults" + (", alike in all runs" if between else "")),
    ):
        if rows:
            parts.append(table(head, [[name, *values] for name, values in rows], caption=caption))
    whole = [folded(f"All settings of {run.name}", element("pre", run.recipe)) for run in runs]
    return joined([*parts, *whole])


def _beside(runs: Sequence[RunFiles], rows: Sequence[Row], caption: str) -> Markup:
    cells = [[name, *values] for name, values in rows if set(values) != {_NOT_RECORDED}]
    if not cells:
        return element("p", "The run folder does not say in which environment the run was.")
    return table(["Part", *(run.name for run in runs)], cells, caption=caption)


def _bindings(run: RunFiles) -> Markup:
    bindings = run.environment.get("bindings", [])
    if not isinstance(bindings, list) or not bindings:
        return Markup()
    rows = [
        [f"{rank}", host, str(binding)]
        for rank, (host, binding) in enumerate(zip(run.hosts, bindings, strict=False))
    ]
    return table(["Rank", "Host", "Bound to"], rows, caption=f"Ranks of {run.name}")


def _counted(hosts: Sequence[str]) -> str:
    if not hosts:
        return _NOT_RECORDED
    counts = {host: hosts.count(host) for host in dict.fromkeys(hosts)}
    return ", ".join(f"{host} ({count} rank{'s' * (count > 1)})" for host, count in counts.items())


def _table_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _keys(run: RunFiles) -> list[tuple[str, str]]:
    return [(table, name) for table, values in run.settings.items() for name in values]


def _written(value: Any) -> str:
    """Return a value as a user types it; an empty text, if the run does not have the setting."""
    if value is None:
        return ""
    return escape_controls(shown(tuple(value) if isinstance(value, list) else value))
