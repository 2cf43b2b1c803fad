"""The judge accepts a legal history, and names the lie in each forged one."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.judge import History, judge
from tests.faults.schedules import PLAN, Fault, Schedule, run, undisturbed

Events = list[dict[str, Any]]
SCHEDULE = Schedule(2, True, [[Fault("stop", 0.3)], [Fault("kill", 0.2)]])


@pytest.fixture(scope="module")
def legal(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Let a run of two ranks be stopped, lose a rank and take another one in."""
    folder = tmp_path_factory.mktemp("legal")
    return run(folder / "run", SCHEDULE, undisturbed(folder / "undisturbed"))


def test_a_legal_history_is_accepted(legal: History) -> None:
    assert judge(legal) == []
    assert {each["event"] for each in legal.events} >= {
        "lock",
        "unlock",
        "write",
        "started",
        "step",
        "published",
        "exit",
    }
    assert {0, 75} <= {each["status"] for each in legal.events if each["event"] == "exit"}
    assert {record["ranks"] for record in legal.ledger if "ranks" in record} == {1, 2}


def change(records: Events, index: int, **values: Any) -> Events:
    """Return the records, of which one has other values."""
    return [each | values if number == index else each for number, each in enumerate(records)]


def places(history: History, event: str) -> list[int]:
    return [number for number, each in enumerate(history.events) if each["event"] == event]


def lines(history: History, name: str) -> list[int]:
    return [number for number, each in enumerate(history.ledger) if name in each]


def of_event(
    event: str, index: int, forge: Callable[[dict[str, Any]], dict[str, Any]]
) -> Callable[[History], History]:
    """Return the forgery of an event of a kind."""

    def forged(history: History) -> History:
        place = places(history, event)[index]
        return history._replace(events=change(history.events, place, **forge(history.events[place])))

    return forged


def of_ledger(
    name: str, index: int, forge: Callable[[dict[str, Any]], dict[str, Any]]
) -> Callable[[History], History]:
    """Return the forgery of a line of the ledger that has a value of this name."""

    def forged(history: History) -> History:
        place = lines(history, name)[index]
        return history._replace(ledger=change(history.ledger, place, **forge(history.ledger[place])))

    return forged


def without(kind: str, index: int) -> Callable[[History], History]:
    """Return the forgery that leaves out a line of the ledger."""

    def forged(history: History) -> History:
        place = lines(history, kind)[index]
        return history._replace(
            ledger=[each for number, each in enumerate(history.ledger) if number != place]
        )

    return forged


def resumed_from_older(history: History) -> History:
    """Let the second start go on from the step before its own."""
    begun = [each for each in history.events if each["event"] == "started" and each["rank"] == 0]
    first = next(each for each in begun if each["step"])
    place, step = history.events.index(first), first["step"] - 1
    return history._replace(events=change(history.events, place, step=step, state=history.states[step]))


def two_writers(history: History) -> History:
    """Let the first process write again after the second one has taken the lock."""
    first, second = places(history, "lock")[:2]
    other = history.events[first]["process"]
    written = {"event": "write", "file": "log.txt", "process": other, "time": history.events[second]["time"]}
    return history._replace(events=[*history.events[: second + 1], written, *history.events[second + 1 :]])


def gone(history: History) -> History:
    newest = max(history.checkpoints)
    return history._replace(
        checkpoints={step: state for step, state in history.checkpoints.items() if step != newest}
    )


def swapped(history: History) -> History:
    first, second, *rest = history.metrics
    return history._replace(metrics=[second, first, *rest])


def logged_again(history: History) -> History:
    place = next(number for number, line in enumerate(history.log) if line.startswith("step "))
    return history._replace(log=[*history.log[: place + 1], *history.log[place:]])


LIES: dict[str, tuple[Callable[[History], History], str]] = {
    "an image twice": (
        of_event("step", 3, lambda each: {"samples": [*each["samples"][1:], each["samples"][1]]}),
        "taken twice",
    ),
    "an image left out": (of_event("step", 3, lambda each: {"samples": each["samples"][1:]}), "left out"),
    "a step of a rank left out": (of_event("step", 4, lambda each: {"step": each["step"] + 1}), "after step"),
    "steps left out of the ledger": (without("steps", 1), "follow step"),
    "a start that follows steps that nobody took": (
        of_ledger("hosts", 1, lambda each: {"step": each["step"] + 1}),
        "are missing",
    ),
    "other samples in the ledger": (
        of_ledger("steps", 0, lambda each: {"checksums": [each["checksums"][0] ^ 1, 0]}),
        "checksums differ",
    ),
    "samples of another epoch": (
        of_ledger("steps", 0, lambda each: {"epoch": each["epoch"] + 1}),
        "of epoch 1",
    ),
    "the ledger of another seed": (
        of_ledger("hosts", 0, lambda each: {"seed": each["seed"] + 1}),
        "seed is 43",
    ),
    "ranks that did not begin": (
        of_ledger("hosts", 0, lambda _: {"ranks": 4, "hosts": ["a"] * 4}),
        "not those that began",
    ),
    "ranks without hosts": (of_ledger("hosts", 0, lambda _: {"hosts": ["a"]}), "not those that began"),
    "a checkpoint that is gone": (gone, "is gone"),
    "a resume from an older one": (resumed_from_older, "had been published"),
    "two writers at one time": (two_writers, "had the lock"),
    "other weights after a step": (
        of_event("step", 5, lambda _: {"state": "0"}),
        "not that of the undisturbed run",
    ),
    "other weights in a checkpoint": (
        of_event("published", 1, lambda _: {"state": "0"}),
        "not that of the undisturbed run",
    ),
    "other weights in its folder": (
        lambda history: history._replace(
            checkpoints=dict(history.checkpoints) | {max(history.checkpoints): "0"}
        ),
        "does not hold the state",
    ),
    "done too early": (
        lambda history: history._replace(
            ledger=[each for each in history.ledger if each.get("steps", [each.get("step")])[-1] < PLAN.steps]
        ),
        "said to be done",
    ),
    "done without the last checkpoint": (
        lambda history: history._replace(
            events=[each for each in history.events if each.get("step") != PLAN.steps]
        ),
        "exit status 0",
    ),
    "log points out of order": (swapped, "metrics: step 1 follows step 2"),
    "a log point that is missing": (
        lambda history: history._replace(metrics=[1, *history.metrics[2:]]),
        r"\[2\] are missing",
    ),
    "a log line twice": (logged_again, "nothing was started in between"),
    "a stop that saved nothing": (
        lambda history: history._replace(log=[], output=history.output.replace("and saved", "and ended")),
        "is of no stop",
    ),
    "a crash": (of_event("exit", 0, lambda _: {"status": -11}), "is not documented"),
    "an error without a name": (
        lambda history: of_event("exit", 0, lambda _: {"status": 1})(history._replace(output="")),
        "without an error",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_forged_history_is_refused(legal: History, lie: str) -> None:
    forge, named = LIES[lie]
    found = judge(forge(legal))
    assert found
    assert any(re.search(named, each) for each in found), found
