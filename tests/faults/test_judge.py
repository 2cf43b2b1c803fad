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
SCHEDULE = Schedule(2, True, [[Fault("stop", 0.3)], [Fault("kill", 0.2)]])


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


def of(kind: str, index: int, forge: Callable[[Record], Record | None]) -> Forgery:
    """Return the forgery of an event, or of a line of the ledger with `kind`; None leaves it out."""

    def forged(history: History) -> History:
        part = "ledger" if kind in ("steps", "hosts") else "events"
        records = list(getattr(history, part))
        place = [number for number, each in enumerate(records) if kind in (each.get("event"), *each)][index]
        change = forge(records[place])
        records[place : place + 1] = [] if change is None else [records[place] | change]
        return history._replace(**{part: records})

    return forged


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


def with_newest(**states: str) -> Forgery:
    """Return the forgery of the newest checkpoint that is left: it is gone, or has another state."""

    def forged(history: History) -> History:
        newest = max(history.checkpoints)
        others = {step: state for step, state in history.checkpoints.items() if step != newest}
        return history._replace(checkpoints=others | dict.fromkeys([newest] * len(states), *states.values()))

    return forged


def with_first_points(*steps: int) -> Forgery:
    return lambda history: history._replace(metrics=[*steps, *history.metrics[2:]])


def logged_again(history: History) -> History:
    place = next(number for number, line in enumerate(history.log) if line.startswith("step "))
    return history._replace(log=[*history.log[: place + 1], *history.log[place:]])


def done_early(history: History) -> History:
    short = [each for each in history.ledger if each.get("steps", [each.get("step")])[-1] < PLAN.steps]
    return history._replace(ledger=short)


def done_unsaved(history: History) -> History:
    return history._replace(events=[each for each in history.events if each.get("step") != PLAN.steps])


def stopped_unsaved(history: History) -> History:
    return history._replace(log=[], output=history.output.replace("and saved", "and ended"))


def unnamed(history: History) -> History:
    return of("exit", 0, lambda _: {"status": 1})(history._replace(output=""))


OTHER = "not that of the undisturbed run"
LIES: list[tuple[str, Forgery, str]] = [
    ("an image twice", of("step", 3, lambda each: {"samples": each["samples"][:1] * 4}), "taken twice"),
    ("an image left out", of("step", 3, lambda each: {"samples": each["samples"][1:]}), "left out"),
    ("a step left out", of("step", 4, lambda each: {"step": each["step"] + 1}), "after step"),
    ("steps missing in the ledger", of("steps", 1, lambda _: None), "follow step"),
    ("a start after steps of nobody", of("hosts", 1, lambda each: {"step": each["step"] + 1}), "are missing"),
    ("other samples", of("steps", 0, lambda each: {"checksums": [each["checksums"][0] ^ 1, 0]}), "differ"),
    ("samples of another epoch", of("steps", 0, lambda each: {"epoch": each["epoch"] + 1}), "of epoch 1"),
    ("another seed", of("hosts", 0, lambda each: {"seed": each["seed"] + 1}), "seed is 43"),
    ("other ranks", of("hosts", 0, lambda _: {"ranks": 4, "hosts": ["a"] * 4}), "not those that began"),
    ("ranks without hosts", of("hosts", 0, lambda _: {"hosts": ["a"]}), "not those that began"),
    ("a checkpoint that is gone", with_newest(), "is gone"),
    ("a resume from an older one", resumed_from_older, "had been published"),
    ("two writers at one time", two_writers, "had the lock"),
    ("other weights after a step", of("step", 5, lambda _: {"state": "0"}), OTHER),
    ("other weights published", of("published", 1, lambda _: {"state": "0"}), OTHER),
    ("other weights in a folder", with_newest(state="0"), "does not hold the state"),
    ("done too early", done_early, "said to be done"),
    ("done without the last checkpoint", done_unsaved, "exit status 0"),
    ("log points out of order", with_first_points(2, 1), "step 1 follows step 2"),
    ("a log point missing", with_first_points(1), r"\[2\] are missing"),
    ("a log line twice", logged_again, "nothing was started in between"),
    ("a stop that saved nothing", stopped_unsaved, "is of no stop"),
    ("a crash", of("exit", 0, lambda _: {"status": -11}), "is not documented"),
    ("an error without a name", unnamed, "without an error"),
]


@pytest.mark.parametrize(("lie", "forge", "named"), LIES, ids=[lie for lie, *_ in LIES])
def test_a_forged_history_is_refused(legal: History, lie: str, forge: Forgery, named: str) -> None:
    found = judge(forge(legal))
    assert any(re.search(named, each) for each in found), (lie, found)
