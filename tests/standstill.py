"""Runs a failed test again if the machine stood still meanwhile, and says so at the end.

A kernel that is starved (see tests/yielding.py), or a virtual machine that gets no core, does nothing for
minutes; then limits of time that are right fail. A thread on each core notes when it wakes up late. A test
that failed without such a standstill stays failed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
from _pytest.runner import runtestprotocol

SECONDS = 15.0  # a busy core delays a thread by a second at most
_INTERVAL = 1.0
_REPETITIONS = 2
_QUIET = 20.0  # seconds without a late thread, before a test is run again
_LONGEST_WAIT = 300.0
_PROPERTY = "standstill"

lateness = [0.0]  # of each core's thread, since the current test began


def pytest_sessionstart() -> None:
    """Start a thread on each core."""
    cores = sorted(os.sched_getaffinity(0))
    lateness[:] = [0.0] * len(cores)
    for number, core in enumerate(cores):
        threading.Thread(target=_watch, args=(number, core), daemon=True).start()


def _watch(number: int, core: int) -> None:
    os.sched_setaffinity(threading.get_native_id(), {core})
    while True:
        began = time.monotonic()
        time.sleep(_INTERVAL)
        lateness[number] = max(lateness[number], time.monotonic() - began - _INTERVAL)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test as pytest does, and again if it failed in a standstill."""
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for repetition in range(_REPETITIONS + 1):
        _forget()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        longest = max(lateness)
        if repetition == _REPETITIONS or longest <= SECONDS or not any(report.failed for report in reports):
            break
        item.user_properties.append((_PROPERTY, round(longest)))
        item.session._setupstate.teardown_exact(None)  # also fixtures of the module, which may have failed
        item._initrequest()  # type: ignore[attr-defined]
        _wait_until_quiet()
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _forget() -> None:
    lateness[:] = [0.0] * len(lateness)


def _wait_until_quiet() -> None:
    end = time.monotonic() + _LONGEST_WAIT
    quiet_since = time.monotonic()
    while time.monotonic() < min(end, quiet_since + _QUIET):
        _forget()
        time.sleep(2 * _INTERVAL)
        if max(lateness) > _INTERVAL:
            quiet_since = time.monotonic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that were run again."""
    for line in _lines(terminalreporter):
        terminalreporter.write_line(line)


def _lines(terminalreporter: pytest.TerminalReporter) -> Iterator[str]:
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, seconds in report.user_properties if report.when == "call" else ():
                if name == _PROPERTY:
                    yield f"run again, because a core stood still for {seconds} s: {report.nodeid}"
