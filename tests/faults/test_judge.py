"""The judge accepts a legal history, and names the lie in each forged one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.judge import History, judge
from tests.faults.schedules import PLAN, Fault, Schedule, run, undisturbed

Record = dict[str, Any]
Forgery = Callable[[History], History]
SCHEDULE = Schedule(2, True, [[Fault("stop", 0.15)], [Fault("kill", 0.1)]])


@pytest.fixture(scope="module")
def legal(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Let a run of two ranks be stopped, lose a rank and take another one in."""
    folder = tmp_path_factory.mktemp("legal")
    return run(folder / "run", SCHEDULE, undisturbed(folder / "undisturbed"))


def test_a_legal_history_is_accepted(legal: History) -> None:
    assert judge(legal) == []
    events = {each["event"] for each in legal.events}
    assert events >= {"lock", "unlock", "write", "started", "step", "published", "exit"}
    assert {0, 75} <= {each["status"] for each in legal.events if each["event"] == "exit"}
    assert sum("ranks" in record for record in legal.ledger) >= 3


def of(kind: str, index: int, forge: Callable[[Record], Record] | None = None) -> Forgery:
    """Return the forgery of an event, or of a line of the ledger with `kind`; without `forge` it is gone."""

    def forged(history: History) -> History:
        part = "ledger" if kind in ("steps", "hosts") else "events"
        records = list(getattr(history, part))
        place = [number for number, each in enumerate(records) if kind in (each.get("event"), *each)][index]
        records[place : place + 1] = [records[place] | forge(records[place])] if forge else []
        return history._replace(**{part: records})

    return forged


def all_of(part: str, forge: Callable[[Any], Any]) -> Forgery:
    return lambda history: history._replace(**{part: forge(getattr(history, part))})


def resumed_from_older(history: History) -> History:
    """Let the second start go on from the step before its own."""
    begun = [each for each in history.events if each["event"] == "started" and each["rank"] == 0]
    first = next(each for each in begun if each["step"])
    forged = first | {"step": first["step"] - 1, "state": history.states[first["step"] - 1]}
    return history._replace(events=[forged if each is first else each for each in history.events])


def two_writers(history: History) -> History:
    """Let the first process write again after the second one has taken the lock."""
    first, second, *_ = (number for number, each in enumerate(history.events) if each["event"] == "lock")
    owner, event = history.events[first]["process"], history.events[second]
    written = event | {"event": "write", "file": "log.txt", "process": owner}
    return history._replace(events=[*history.events[: second + 1], written, *history.events[second + 1 :]])


OTHER = "not that of the undisturbed run"
LIES: dict[str, tuple[str | Forgery, ...]] = {  # what the judge says, and the forgeries
    "an image twice": ("taken twice", of("step", 3, lambda each: {"samples": each["samples"][:1] * 4})),
    "an image left out": ("left out", of("step", 3, lambda each: {"samples": each["samples"][1:]})),
    "a step left out": ("took step .* after step", of("step", 4, lambda each: {"step": each["step"] + 1})),
    "steps missing in the ledger": (r"steps is \[\d+, \d+\], not", of("steps", 1)),
    "a start after steps of nobody": ("are missing", of("hosts", 1, lambda each: {"step": each["step"] + 1})),
    "other samples": ("differ", of("steps", 0, lambda each: {"checksums": [each["checksums"][0] ^ 1, 0]})),
    "samples of another epoch": ("epoch is 1", of("steps", 0, lambda each: {"epoch": each["epoch"] + 1})),
    "another seed": ("seed is 43", of("hosts", 0, lambda each: {"seed": each["seed"] + 1})),
    "other ranks": ("not those that began", of("hosts", 0, lambda _: {"ranks": 4, "hosts": ["a"] * 4})),
    "ranks without hosts": ("ranks is 2, not 1", of("hosts", 0, lambda _: {"hosts": ["a"]})),
    "a checkpoint that is gone": ("is gone", all_of("checkpoints", lambda by: dict(sorted(by.items())[:-1]))),
    "a resume from an older one": ("had been published", resumed_from_older),
    "two writers at one time": ("had the lock", two_writers),
    "other weights after a step": (f"step: .* {OTHER}", of("step", 5, lambda _: {"state": "0"})),
    "other weights published": (f"published: .* {OTHER}", of("published", 1, lambda _: {"state": "0"})),
    "other weights in a folder": (
        f"checkpoint: .* {OTHER}",
        all_of("checkpoints", lambda left: left | {PLAN.steps: "0"}),
    ),
    "done too early": ("said to be done", of("steps", -1)),
    "done without the last checkpoint": ("exit status 0", of("published", -1)),
    "log points out of order": ("step 1 follows step 2", all_of("metrics", lambda steps: [2, 1, *steps[2:]])),
    "a log point missing": (r"\[2\] are missing", all_of("metrics", lambda steps: [1, *steps[2:]])),
    "a log line twice": ("nothing was started", all_of("log", lambda log: f"{log}step {PLAN.steps}/")),
    "a stop that saved nothing": (
        "is of no stop",
        all_of("log", lambda _: ""),
        all_of("output", lambda text: text.replace("and saved", "and ended")),
    ),
    "a crash": ("is not documented", of("exit", 0, lambda _: {"status": -11})),
    "an error without a name": (
        "without an error",
        of("exit", 0, lambda _: {"status": 1}),
        all_of("output", lambda _: ""),
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_forged_history_is_refused(legal: History, lie: str) -> None:
    named, *forgeries = LIES[lie]
    for forge in forgeries:
        legal = forge(legal)
    assert re.search(named, found := "\n".join(judge(legal))), (lie, found)
