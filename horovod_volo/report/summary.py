"""The main figures of each run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter

from horovod_volo.report.curves import hours_at, mean_over_time
from horovod_volo.report.markup import Markup, element, table
from horovod_volo.report.quantities import AVERAGED, SCORES, quantity
from horovod_volo.report.run_files import RunFiles
from horovod_volo.report.scaling import speed_points


def summary(runs: Sequence[RunFiles]) -> Markup:
    """Return the main figures of each run."""
    rows = [[name, *(of_run(run) for run in runs)] for name, of_run in _FACTS.items()]
    rows = [row for row in rows if any(row[1:])]
    if len(runs) > 1:
        return table(["Figure", *(run.name for run in runs)], rows, caption="The runs beside each other")
    pairs = []
    for name, value in rows:
        kind = "detail" if name in _DETAILS else None
        pairs.append(element("div", element("dt", name), element("dd", value), class_=kind))
    return element("dl", *pairs, class_="facts")


def _score(run: RunFiles) -> str:
    """Return the best value of the main metric, of which weights, and when."""
    found = [
        (record[name], key, name, record)
        for record in run.evaluations
        for key in SCORES
        for name in (key, AVERAGED + key)
        if name in record
    ]
    if not found:
        return ""
    value, key, name, record = max(found, key=itemgetter(0))
    weights = " (averaged weights)" if name != key else ""
    length = run.steps_per_epoch
    epoch = f" after epoch {record['step'] / length:.4g}" if length else f" at step {record['step']:,.0f}"
    return f"{quantity(key).title.split(',')[0]} {quantity(key).written(value)}{weights}{epoch}"


def _progress(run: RunFiles) -> str:
    last = max(record["step"] for record in [*run.training, *run.evaluations])
    if not run.steps_per_epoch:
        return f"step {last:,.0f}"
    done = f"{last / run.steps_per_epoch:.4g}"
    return f"{done} of {run.epochs}" if run.epochs else done


def _speed_of(run: RunFiles) -> str:
    """Return the speed on the ranks that the run had last; an elastic run may have had others before."""
    last = run.hosts_at(run.training[-1]["step"]) if run.training else []
    for point in speed_points(run):
        if (point.ranks, point.nodes) == (len(last), len(set(last))):
            return f"{point.images_per_second:,.0f} images/s, {point.of_rank:,.0f} a rank"
    return ""


def _time_of(run: RunFiles) -> str:
    hours = hours_at(run, math.inf)
    if hours is None:
        return ""
    return f"{hours:.1f} h" if hours >= 2 else f"{60 * hours:.1f} min"


def _mean(run: RunFiles, key: str) -> str:
    mean = mean_over_time(run, key)
    return "" if mean is None else quantity(key).written(quantity(key).scaled(mean))


def _ranks(run: RunFiles) -> str:
    hosts = run.hosts
    count = len(set(hosts))
    ranks = f"{len(hosts)} rank{'s' * (len(hosts) != 1)}"
    return f"{ranks} on {count} host{'s' * (count != 1)}" if hosts else ""


def _model(run: RunFiles) -> str:
    side = run.setting("model", "img_size")
    return run.banner.get("model") or f"{run.setting('model', 'model') or 'unknown'}, {side} px"


def _loss(run: RunFiles) -> str:
    losses = [record["loss"] for record in run.training if "loss" in record]
    return quantity("loss").written(losses[-1]) if losses else ""


def _state(run: RunFiles) -> str:
    steps = ", ".join(f"{start.step:,}" for start in run.starts if start.step)
    resumed = f", resumed at step {steps}" if steps else ""
    lines = "line of metrics.jsonl is" if run.damaged == 1 else "lines of metrics.jsonl are"
    damaged = f"; {run.damaged} damaged {lines} left out" if run.damaged else ""
    for beginning, state in (("done:", "finished"), ("stopped", "stopped and saved")):
        if run.last_line.startswith(beginning):
            return state + resumed + damaged
    return f"training, or ended without a last line in its log{resumed}{damaged}"


_FACTS = {
    "Best": _score,
    "Epochs": _progress,
    "Loss at the end": _loss,
    "Speed": _speed_of,
    "Time": _time_of,
    "MFU": lambda run: _mean(run, "mfu"),
    "Waiting for data": lambda run: _mean(run, "data_wait"),
    "Ranks": _ranks,
    "Model": _model,
    "Batch": lambda run: run.banner.get("batch", ""),
    "Learning rate": lambda run: run.banner.get("lr", ""),
    "Precision": lambda run: run.banner.get("precision", "") or str(run.setting("model", "precision") or ""),
    "Data": lambda run: run.banner.get("data", ""),
    "State": _state,
}
_DETAILS = ("Batch", "Learning rate", "Precision", "Data", "State")
