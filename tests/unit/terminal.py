"""A clock and a terminal for tests of progress lines."""

from __future__ import annotations

import os
import time

import pytest


class FakeClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def stop_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Replace the monotonic clock by one that the test sets."""
    clock = FakeClock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def read(screen: int, *, ending: str) -> str:
    """Read the output of a terminal up to `ending`."""
    shown = b""
    while not shown.endswith(ending.encode()):
        shown += os.read(screen, 1000)
    return shown.decode()
