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

DONE, STOPPED, FAILED, MISTAKE = 0, 75, 1, 2
KILLED = {-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
_NAMED = re.compile(r"error|\bends: |\bstops: |Traceback")
_SUMS = 1 << CHECKSUM_BITS


class RunPlan(NamedTuple):
    """What a run is to do."""

    seed: int
    images: int
    global_batch: int
    steps: int  # in all epochs

    @property
    def steps_per_epoch(self) -> int:
        return self.images // self.global_batch

    def samples(self, step: int) -> list[int]:
        """Return the samples of a step, which is counted from 1."""
        epoch, before = divmod(step - 1, self.steps_per_epoch)
        order = epoch_order(self.seed, epoch, self.images).tolist()
        return [int(each) for each in order[before * self.global_batch : (before + 1) * self.global_batch]]


class History(NamedTuple):
    """What was recorded of a run."""

    plan: RunPlan
    states: Sequence[str]  # hashes of the state after each step of an undisturbed run; empty: not compared
    events: list[dict[str, Any]]  # with `event`, `time` and `process`, as counting_rank.py notes them
    ledger: list[dict[str, Any]]
    metrics: list[int]  # steps of the log points in metrics.jsonl
    log: list[str]  # lines of log.txt
    checkpoints: Mapping[int, str]  # hashes of those that are left, by step
    output: str  # of all starts


def read_history(
    folder: Path, plan: RunPlan, states: Sequence[str], checkpoints: Mapping[int, str]
) -> History:
    """Read what the starts of a run have left in a folder, the run's own in runs/run."""
    run = folder / "runs" / "run"
    events = sorted(parsed(folder / "history.jsonl"), key=lambda each: each["time"])
    metrics = [each["step"] for each in parsed(run / "metrics.jsonl") if "lr" in each]
    ledger, log = parsed(run / "ledger.jsonl"), (run / "log.txt").read_text().splitlines()
    output = "\n".join(file.read_text(errors="replace") for file in sorted(folder.glob("output*")))
    return History(plan, states, events, ledger, metrics, log, checkpoints, output)


def parsed(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file, without those that a killed process wrote in part."""
    found: list[Any] = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [each for each in found if isinstance(each, dict)]


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
        if "steps" not in record:
            for name in ("seed", "images", "global_batch"):
                if record[name] != getattr(plan, name):
                    yield f"ledger: {name} is {record[name]}, not {getattr(plan, name)}"
            if record["step"] > reached:
                yield f"ledger: steps {reached + 1} to {record['step']} are missing"
            is_known = (record["step"], record["ranks"]) in begun or "steps" not in following
            if record["ranks"] != len(record["hosts"]) or not is_known:  # unknown ranks took no step
                yield f"ledger: {record['ranks']} ranks at step {record['step']} are not those that began"
            reached = record["step"]
            continue
        first, last = record["steps"]
        steps = range(first, last + 1)
        epoch, before = divmod(first - 1, plan.steps_per_epoch)
        span = [before * plan.global_batch, (before + len(steps)) * plan.global_batch]
        if first != reached + 1 or not steps:
            yield f"ledger: steps {first} to {last} follow step {reached}"
        if (record["epoch"], record["samples"]) != (epoch, span):
            taken = f"samples {record['samples']} of epoch {record['epoch']}"
            yield f"ledger: steps {first} to {last} have {taken}"
        samples = [each for step in steps for each in plan.samples(step)]
        total = int(bits_of_samples(Purpose.LEDGER, plan.seed, epoch, np.array(samples)).sum())
        if total % _SUMS != record["checksums"][0] % _SUMS:
            yield f"ledger: steps {first} to {last} took other samples: their checksums differ"
        if not noted.issuperset(steps):
            yield f"ledger: steps {sorted(set(steps) - noted)} were taken by no rank"
        reached = last
    if (DONE in statuses(history)) and reached != plan.steps:
        yield f"ledger: the run is said to be done, at step {reached} of {plan.steps}"


def _steps(history: History) -> Iterator[str]:
    """Each set of ranks takes the images of each step once, step after step."""
    plan = history.plan
    taken: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
    reached: dict[tuple[str, int], int] = {}
    ranks = {}
    for each in history.events:
        if each["event"] == "started":
            reached[each["set"], each["rank"]] = each["step"]
            ranks[each["set"]] = each["ranks"]
        elif each["event"] == "step":
            place = each["set"], each["rank"]
            if reached.get(place) != each["step"] - 1:
                yield f"rank {each['rank']} took step {each['step']} after step {reached.get(place)}"
            reached[place] = each["step"]
            taken[each["set"], each["step"]].append(each["samples"])
    for (name, step), by_rank in taken.items():
        found, expected = Counter(chain.from_iterable(by_rank)), Counter(plan.samples(step))
        if twice := sorted((found - expected).elements()):
            yield f"step {step}: samples {twice} are taken twice, or are of another step"
        if len(by_rank) == ranks[name] and (left := sorted((expected - found).elements())):
            yield f"step {step}: samples {left} are left out"


def _states(history: History) -> Iterator[str]:
    """Weights, and all else that a step changes, are those of the undisturbed run."""
    known = dict(enumerate(history.states))
    held = [(each, each["step"], each["state"]) for each in history.events if "state" in each]
    for what, step, state in held:
        if history.states and known.get(step) != state:
            yield f"{what['event']}: the state of step {step} is not that of the undisturbed run"
    for step, state in history.checkpoints.items():
        if history.states and known.get(step) != state:
            yield f"checkpoint {step} does not hold the state of the undisturbed run"


def _checkpoints(history: History) -> Iterator[str]:
    """Nobody goes on from before the newest published checkpoint, unless that is said to be damaged."""
    published: list[int] = []
    damaged = {
        int(step) for step in re.findall(r"step_(\d+) is damaged", "\n".join(history.log) + history.output)
    }
    for each in history.events:
        if each["event"] == "published":
            published.append(each["step"])
        if each["event"] == "started" and each["rank"] == 0:
            if lost := [step for step in published if step > each["step"] and step not in damaged]:
                yield f"step {each['step']} was resumed, but checkpoint {max(lost)} had been published"
            published = [step for step in published if step <= each["step"]]
    if published and max(published) not in history.checkpoints and max(published) not in damaged:
        yield f"checkpoint {max(published)} was published last, and is gone"


def _writers(history: History) -> Iterator[str]:
    """Only the process that took the lock last writes into the run folder."""
    owner = None
    for each in history.events:
        if each["event"] == "lock":
            owner = each["process"]
        elif each["event"] == "unlock" and each["process"] == owner:
            owner = None
        elif each["event"] in ("write", "published") and each["process"] != owner:
            what = each.get("file", f"checkpoint {each.get('step')}")
            yield f"process {each['process']} wrote {what} while {owner or 'nobody'} had the lock"


def _log_points(history: History) -> Iterator[str]:
    """Log points are in order, none twice; one is missing only where ranks were lost or the disk was full."""
    begun = {each["step"] for each in history.events if each["event"] == "started"}
    unwritten = "cannot be written" in history.output
    for before, step in zip([0, *history.metrics], history.metrics, strict=False):
        if step <= before:
            yield f"metrics: step {step} follows step {before}"
        elif missing := [each for each in range(before + 1, step) if each not in begun and not unwritten]:
            yield f"metrics: steps {missing} are missing"
    reached = 0
    for line in history.log:
        if found := re.match(r"step (\d+)/", line):
            if int(found[1]) <= reached:
                yield f"log: step {found[1]} follows step {reached}, and nothing was started in between"
            reached = int(found[1])
        elif re.match(r" +world|formed again", line):
            reached = 0


def _exits(history: History) -> Iterator[str]:
    """Processes end with a documented status, and what it says is so."""
    published, text = [0], "\n".join([*history.log, history.output])
    for each in history.events:
        if each["event"] == "published":
            published.append(each["step"])
        if each["event"] != "exit" or each["status"] in KILLED:
            continue
        status = each["status"]
        if status == DONE:
            if max(published) < history.plan.steps or f"done: {history.plan.steps} steps" not in text:
                yield f"exit status 0 at step {max(published)} of {history.plan.steps}"
        elif status == STOPPED:
            if not any(f"stopped at step {step} and saved" in text for step in published):
                yield f"exit status 75, but checkpoint {max(published)} is of no stop"
        elif status not in (FAILED, MISTAKE):
            yield f"exit status {status} is not documented"
        elif not _NAMED.search(history.output):
            yield f"exit status {status} without an error that is named"


def statuses(history: History) -> set[int]:
    """Return the exit statuses of all ranks."""
    return {each["status"] for each in history.events if each["event"] == "exit"}
