"""The environment and the recipe of runs as tables: first what differs, then everything, folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from horovod_volo.config.values import all_settings, shown
from horovod_volo.core.errors import escape_controls
from horovod_volo.report.markup import Markup, element, folded, joined, table
from horovod_volo.report.run_files import RunFiles

_NOT_RECORDED = "not recorded"


def environment(runs: Sequence[RunFiles]) -> Markup:
    """Return versions, hosts and what each rank is bound to."""
    environments = [run.environment for run in runs]
    recorded = [each.get("packages") for each in environments]
    packages = [each if isinstance(each, dict) else {} for each in recorded]
    names = dict.fromkeys(name for of_run in packages for name in of_run)
    rows = [_row("Code", environments, "commit"), _row("Python", environments, "python")]
    rows += [_row(name, packages, name) for name in names]
    rows.append(["Hosts", *(_counted(run.hosts) for run in runs)])
    rows.append(_row("World", [run.banner for run in runs], "world"))
    rows = [row for row in rows if set(row[1:]) != {_NOT_RECORDED}]
    head = ["Part", *(run.name for run in runs)]
    parts = [table(head, rows, caption="Versions and hosts")]
    if not rows:
        parts = [element("p", "The run folder does not say in which environment the run was.")]
    bindings = [_bindings(run) for run in runs]
    if any(bindings):
        parts.append(folded("Ranks and what they are bound to", *bindings))
    return joined(parts)


def _row(title: str, found: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    return [title, *(str(of_run.get(key, _NOT_RECORDED)) for of_run in found)]


def recipe(runs: Sequence[RunFiles]) -> Markup:
    """Return the settings that differ: between the runs, and from the defaults; and all of them, folded."""
    defaults = {(setting.group, setting.name): setting.default for setting in all_settings()}
    given = [(group, name) for run in runs for group, values in run.settings.items() for name in values]
    changed, between = [], []
    for key in dict.fromkeys([*defaults, *given]):
        if key == ("run", "name"):
            continue  # it heads the column
        values = [_written(run.setting(*key)) for run in runs]
        default = _written(defaults[key]) if key in defaults else "not a setting of this version"
        row = [".".join(key), default, *values]
        if len(set(values)) > 1:
            between.append(row)
        elif any(value not in (default, "") for value in values):
            changed.append(row)
    head = ["Setting", "Default", *(run.name for run in runs)]
    tables = {
        "What differs between the runs": between,
        "What differs from the defaults" + (", alike in all runs" if between else ""): changed,
    }
    parts = [table(head, rows, caption=caption) for caption, rows in tables.items() if rows]
    whole = [folded(f"All settings of {run.name}", element("pre", run.recipe)) for run in runs]
    return joined([*parts, *whole])


def _bindings(run: RunFiles) -> Markup:
    bindings = run.environment.get("bindings", [])
    if not isinstance(bindings, list) or not bindings:
        return Markup()
    rows = [[f"{rank}", host, f"{bound}"] for rank, host, bound in zip(count(), run.hosts, bindings)]
    return table(["Rank", "Host", "Bound to"], rows, caption=f"Ranks of {run.name}")


def _counted(hosts: Sequence[str]) -> str:
    said = [f"{host} ({ranks} rank{'s' * (ranks > 1)})" for host, ranks in Counter(hosts).items()]
    return ", ".join(said) or _NOT_RECORDED


def _written(value: Any) -> str:
    """Return a value as a user types it; an empty text, if the run does not have the setting."""
    value = tuple(value) if isinstance(value, list) else value
    return "" if value is None else escape_controls(shown(value))
