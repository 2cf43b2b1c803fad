"""Judges the recorded history of a run: whether what was done, in spite of whatever happened, was legal.

The judge knows what the run was to do and what was recorded, and nothing of the faults. It follows the order
of samples by itself, and shares no code with the doctor's check of the ledger.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horovod_volo.cluster.step_statistics import CHECKSUM_BITS
from horovod_volo.core.rng import Purpose, bits_of_samples
from horovod_volo.data.sampler import epoch_order
from tests.faults.counting_rank import states_of_checkpoints

DONE, STOPPED, FAILED, MISTAKE = 0, 75, 1, 2
KILLED = {-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
_NAMED = re.compile(r"error|\bends: |\bstops: |Traceback")


class RunPlan(NamedTuple):
    """What a run is to do."""

    seed: int
    images: int
    global_batch: int
    steps: int  # in all epochs

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, which is counted from 1, and where in its order the step begins."""
        steps_per_epoch = self.images // self.global_batch
        return divmod((step - 1) * self.global_batch, steps_per_epoch * self.global_batch)

    def samples(self, step: int) -> list[int]:
        """Return the samples of a step."""
        epoch, first = self.place(step)
        return epoch_order(self.seed, epoch, self.images)[first : first + self.global_batch].tolist()


class History(NamedTuple):
    """What was recorded of a run."""

    plan: RunPlan
    states: Sequence[str]  # hashes of the state after each step of an undisturbed run; empty: not compared
    events: list[dict[str, Any]]  # with `event`, `time` and `process`, as counting_rank.py notes them
    ledger: list[dict[str, Any]]
    metrics: list[int]  # steps of the log points in metrics.jsonl
    log: str
    checkpoints: Mapping[int, str]  # hashes of those that are left, by step
    output: str  # of all starts

    @property
    def text(self) -> str:
        return self.log + self.output


def read_history(folder: Path, plan: RunPlan, states: Sequence[str] = ()) -> History:
    """Read what the starts of a run have left in a folder, the run's own in runs/run."""
    run = folder / "runs" / "run"
    events = sorted(parsed(folder / "history.jsonl"), key=lambda each: each["time"])
    metrics = [each["step"] for each in parsed(run / "metrics.jsonl") if "lr" in each]
    ledger, log = list(parsed(run / "ledger.jsonl")), (run / "log.txt").read_text()
    output = "\n".join(file.read_text(errors="replace") for file in sorted(folder.glob("output*")))
    return History(plan, states, events, ledger, metrics, log, states_of_checkpoints(run), output)


def parsed(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, without those that a killed process wrote in part."""
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):
            yield json.loads(line)


def judge(history: History) -> list[str]:
    """Return what was illegal in a history; nothing if all was legal."""
    judges = (_ledger, _steps, _states, _checkpoints, _writers, _log_points, _exits)
    return [finding for each in judges for finding in each(history)]


def _ledger(history: History) -> Iterator[str]:
    """All steps follow each other, with the samples of the order, by the ranks that there were."""
    plan, reached = history.plan, 0
    noted = {each["step"] for each in history.events if each["event"] == "step"}
    begun = {(each["step"], each["ranks"]) for each in history.events if each["event"] == "started"}
    for record, following in pairwise([*history.ledger, {}]):
        if "steps" in record:
            last = max(record["steps"][1], reached + 1)
            steps, (epoch, first) = range(reached + 1, last + 1), plan.place(reached + 1)
            samples = [each for step in steps for each in plan.samples(step)]
            span = [first, first + len(samples)]
            expected = {"steps": [reached + 1, last], "epoch": epoch, "samples": span}
            total = int(bits_of_samples(Purpose.LEDGER, plan.seed, epoch, np.array(samples)).sum())
            if (total - record["checksums"][0]) % (1 << CHECKSUM_BITS):
                yield f"ledger: steps {reached + 1} to {last} took other samples: their checksums differ"
            if not noted.issuperset(steps):
                yield f"ledger: steps {sorted(set(steps) - noted)} were taken by no rank"
        else:
            last, settings = record["step"], ("seed", "images", "global_batch")
            expected = {name: getattr(plan, name) for name in settings} | {"ranks": len(record["hosts"])}
            if last > reached:
                yield f"ledger: steps {reached + 1} to {last} are missing"
            if (last, record["ranks"]) not in begun and "steps" in following:  # others were lost before
                yield f"ledger: {record['ranks']} ranks at step {last} are not those that began"
        for name, value in expected.items():
            if record[name] != value:
                yield f"ledger: after step {reached} {name} is {record[name]}, not {value}"
        reached = last
    if reached != plan.steps and DONE in [each.get("status") for each in history.events]:
        yield f"ledger: the run is said to be done, at step {reached} of {plan.steps}"


def _steps(history: History) -> Iterator[str]:
    """Each set of ranks takes the images of each step once, step after step."""
    reached: dict[tuple[str, int], int] = {}
    taken: dict[tuple[str, int, int], list[list[int]]] = defaultdict(list)
    for each in history.events:
        if each["event"] in ("started", "step"):
            rank, before = (each["set"], each["rank"]), reached.get((each["set"], each["rank"]))
            reached[rank] = each["step"]
            if each["event"] == "step":
                taken[each["set"], each["step"], each["ranks"]].append(each["samples"])
                if before != each["step"] - 1:
                    yield f"rank {each['rank']} took step {each['step']} after step {before}"
    for (_, step, ranks), by_rank in taken.items():
        found, expected = Counter(chain.from_iterable(by_rank)), Counter(history.plan.samples(step))
        if twice := sorted((found - expected).elements()):
            yield f"step {step}: samples {twice} are taken twice, or are of another step"
        if len(by_rank) == ranks and (left := sorted((expected - found).elements())):
            yield f"step {step}: samples {left} are left out"


def _states(history: History) -> Iterator[str]:
    """Weights, and all else that a step changes, are those of the undisturbed run."""
    known = dict(enumerate(history.states))
    held = [(each["event"], each["step"], each["state"]) for each in history.events if "state" in each]
    held += [("checkpoint", *each) for each in history.checkpoints.items()]
    for where, step, state in held if known else ():
        if known.get(step) != state:
            yield f"{where}: the state of step {step} is not that of the undisturbed run"


def _checkpoints(history: History) -> Iterator[str]:
    """Nobody goes on from before the newest published checkpoint, unless that is said to be damaged."""
    damaged, newest = set(map(int, re.findall(r"step_(\d+) is damaged", history.text))), 0
    for each in history.events:
        if each["event"] == "published" and each["step"] not in damaged:
            newest = max(newest, each["step"])
        elif each["event"] == "started" and each["rank"] == 0:
            if newest > each["step"]:
                yield f"step {each['step']} was resumed, but checkpoint {newest} had been published"
            newest = min(newest, each["step"])
    if newest and newest not in history.checkpoints:
        yield f"checkpoint {newest} was published last, and is gone"


def _writers(history: History) -> Iterator[str]:
    """Only the process that took the lock last writes into the run folder."""
    owner = None
    for each in history.events:
        event, process = each["event"], each["process"]
        if event == "lock":
            owner = process
        elif event == "unlock" and process == owner:
            owner = None
        elif event in ("write", "published") and process != owner:
            what = each.get("file", f"checkpoint {each.get('step')}")
            yield f"process {process} wrote {what} while {owner or 'nobody'} had the lock"


def _log_points(history: History) -> Iterator[str]:
    """Log points are in order, none twice; one is missing only where ranks were lost or the disk was full."""
    begun = {each["step"] for each in history.events if each["event"] == "started"}
    for before, step in pairwise([0, *history.metrics]):
        if step <= before:
            yield f"metrics: step {step} follows step {before}"
        missing = sorted({*range(before + 1, step)} - begun)
        if missing and "cannot be written" not in history.output:
            yield f"metrics: steps {missing} are missing"
    for of_one_start in re.split(r"(?m)^(?: +world|formed again)", history.log):
        for before, step in pairwise(map(int, re.findall(r"(?m)^step (\d+)/", of_one_start))):
            if step <= before:
                yield f"log: step {step} follows step {before}, and nothing was started in between"


def _exits(history: History) -> Iterator[str]:
    """Processes end with a documented status, and what it says is so."""
    published = [0]
    for each in history.events:
        status = each.get("status")
        if each["event"] == "published":
            published.append(each["step"])
        elif status == DONE:
            if max(published) < history.plan.steps or f"done: {history.plan.steps} steps" not in history.text:
                yield f"exit status 0 at step {max(published)} of {history.plan.steps}"
        elif status == STOPPED:
            if not any(f"stopped at step {step} and saved" in history.text for step in published):
                yield f"exit status 75, but checkpoint {max(published)} is of no stop"
        elif status in (FAILED, MISTAKE):
            if not _NAMED.search(history.output):
                yield f"exit status {status} without an error that is named"
        elif status is not None and status not in KILLED:
            yield f"exit status {status} is not documented"
