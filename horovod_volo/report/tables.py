"""The tables of a report: the main figures of runs, their environment and their settings."""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from horovod_volo.config.schema import all_settings
from horovod_volo.config.setting import shown
from horovod_volo.core.errors import counted, escape_controls
from horovod_volo.report.curves import mean_over_time, speeds
from horovod_volo.report.markup import Markup, element, folded, joined, table
from horovod_volo.report.quantities import AVERAGED, MAIN_SCORES, quantity
from horovod_volo.report.run_folder import RunFolder

_DETAILS = ("Batch", "Learning rate", "Precision", "Data", "State")


def summary(runs: Sequence[RunFolder]) -> Markup:
    """Return the main figures of each run."""
    figures = [_figures(run) for run in runs]
    if len(runs) > 1:
        return _beside(runs, figures, "The runs beside each other")
    pairs = [
        element(
            "div", element("dt", name), element("dd", text), class_="detail" if name in _DETAILS else None
        )
        for name, text in figures[0].items()
        if text
    ]
    return element("dl", *pairs, class_="facts")


def _beside(runs: Sequence[RunFolder], found: Sequence[Mapping[str, Any]], caption: str) -> Markup:
    """Return a table of the values that runs have by name, without the names that have none."""
    names = dict.fromkeys(name for each in found for name in each)
    rows = [[name, *(str(each.get(name, "")) for each in found)] for name in names]
    rows = [row for row in rows if any(row[1:])]
    return table(["What", *(run.name for run in runs)], rows, caption=caption) if rows else Markup()


def _figures(run: RunFolder) -> dict[str, str]:
    """Return the main figures of a run by name; an empty text where one is not recorded."""
    last = max([*run.training, *run.evaluations], key=lambda record: record["step"])
    losses = [record["loss"] for record in run.training if "loss" in record]
    hours = run.training[-1].get("hours") if run.training else None
    hosts, banner = run.hosts, run.banner
    ranks = f"{counted(len(hosts), 'rank')} on {counted(len(set(hosts)), 'host')}"
    network = f"{run.settings.get('model.model')}, {run.settings.get('model.img_size')} px"
    return {
        "Best": _best_score(run),
        "Epochs": f"{last['epoch']:.4g} of {_epochs(run)}",
        "Loss at the end": quantity("loss").written(losses[-1]) if losses else "",
        "Speed": _latest_speed(run),
        "Time": "" if hours is None else f"{hours:.1f} h" if hours >= 2 else f"{60 * hours:.1f} min",
        "MFU": _mean(run, "mfu"),
        "Waiting for data": _mean(run, "data_wait"),
        "Ranks": ranks if hosts else "",
        "Model": banner.get("model", network),
        "Batch": banner.get("batch", ""),
        "Learning rate": banner.get("lr", ""),
        "Precision": banner.get("precision") or run.settings.get("model.precision", ""),
        "Data": banner.get("data", ""),
        "State": _state(run),
    }


def _epochs(run: RunFolder) -> int:
    prefix = run.settings.get("update.warmup_prefix")
    parts = ["epochs", "cooldown_epochs", *(["warmup_epochs"] if prefix else [])]
    return sum(run.settings.get(f"update.{part}", 0) for part in parts)


def _best_score(run: RunFolder) -> str:
    """Return the best value of the main metric, of which weights, and when."""
    found = [
        (record[name], record["epoch"], key, " (averaged weights)" if name != key else "")
        for record in run.evaluations
        for key in MAIN_SCORES
        for name in (key, AVERAGED + key)
        if name in record
    ]
    if not found:
        return ""
    value, epoch, key, weights = max(found, key=itemgetter(0))
    title = quantity(key).title.split(",")[0]
    return f"{title} {quantity(key).written(value)}{weights} after epoch {epoch:.4g}"


def _latest_speed(run: RunFolder) -> str:
    """Return the speed on the ranks that the run had last; an elastic run may have had others before."""
    last = run.hosts_at(run.training[-1]["step"]) if run.training else []
    speed = speeds(run).get((len(last), len(set(last))))
    return f"{speed:,.0f} images/s, {speed / len(last):,.0f} a rank" if speed else ""


def _mean(run: RunFolder, key: str) -> str:
    mean = mean_over_time(run, key)
    return "" if mean is None else quantity(key).written(quantity(key).scaled(mean))


def _state(run: RunFolder) -> str:
    resumed = [f"{start['step']:,}" for start in run.starts if start["step"]]
    state = "training, or ended without a last line in its log"
    for beginning, name in (("done:", "finished"), ("stopped", "stopped and saved")):
        if run.last_line.startswith(beginning):
            state = name
    return f"{state}, resumed at step {', '.join(resumed)}" if resumed else state


def environment(runs: Sequence[RunFolder]) -> Markup:
    """Return versions, hosts and what each rank is bound to; nothing, if no run recorded them."""
    found = []
    for run in runs:
        hosts = [f"{host} ({counted(n, 'rank')})" for host, n in Counter(run.hosts).items()]
        about = {"Code": run.environment.get("commit", ""), "Python": run.environment.get("python", "")}
        about |= run.environment.get("packages", {})
        found.append(about | {"Hosts": ", ".join(hosts), "World": run.banner.get("world", "")})
    parts = [_beside(runs, found, "Versions and hosts")]
    for run in runs:
        bound = zip(run.hosts, run.environment.get("bindings", []), strict=False)
        rows = [[f"{rank}", host, binding] for rank, (host, binding) in enumerate(bound)]
        bindings = table(["Rank", "Host", "Bound to"], rows, caption=f"Ranks of {run.name}")
        parts += [folded(f"What the ranks of {run.name} are bound to", bindings)] if rows else []
    return joined(parts)


def recipe(runs: Sequence[RunFolder]) -> Markup:
    """Return the settings that differ: between the runs, and from the defaults; and all of them, folded."""
    defaults = {f"{setting.group}.{setting.name}": _written(setting.default) for setting in all_settings()}
    changed, between = [], []
    for key in dict.fromkeys([*defaults, *(key for run in runs for key in run.settings)]):
        values = [_written(run.settings.get(key)) for run in runs]
        row = [key, defaults.get(key, "not a setting of this version"), *values]
        if key == "run.name":
            continue  # it heads the column
        if len(set(values)) > 1:
            between.append(row)
        elif values[0] not in (row[1], ""):
            changed.append(row)
    head = ["Setting", "Default", *(run.name for run in runs)]
    tables = {
        "What differs between the runs": between,
        "What differs from the defaults" + (", alike in all runs" if between else ""): changed,
    }
    parts = [table(head, rows, caption=caption) for caption, rows in tables.items() if rows]
    whole = [folded(f"All settings of {run.name}", element("pre", run.recipe)) for run in runs]
    return joined([*parts, *whole])


def _written(value: Any) -> str:
    """Return a value as a user types it; an empty text, if the run does not have the setting."""
    value = tuple(value) if isinstance(value, list) else value
    return "" if value is None else escape_controls(shown(value))
