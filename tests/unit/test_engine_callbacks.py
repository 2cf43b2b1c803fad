"""Errors of callbacks: each is printed once, and the first ends the run."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_volo.cluster.world import AllRanksError, World
from horovod_volo.engine.callbacks import Callback, Callbacks
from horovod_volo.engine.interrupts import StopRequest


class RunWithoutSteps:
    """What a callback and its errors need of a run."""

    world = World.single()

    def log(self, text: str) -> None:
        print(text)


class FailsAtEachStep(Callback):
    """Fails with its own text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def step_done(self, run: Any) -> None:
        raise ValueError(self.text)


def test_the_error_of_each_callback_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    stop = StopRequest()
    run: Any = RunWithoutSteps()
    callbacks = Callbacks([FailsAtEachStep("the first"), Callback(), FailsAtEachStep("the second")], stop)
    for _ in range(3):
        callbacks.step_done(run)
    assert stop.received
    printed = capsys.readouterr().err
    for text in ("the first", "the second"):
        assert printed.count(f"The callback FailsAtEachStep failed in step_done: ValueError: {text} (") == 1
        assert printed.count(f"\nValueError: {text}\n") == 1
    with pytest.raises(AllRanksError, match="ValueError: the first"):
        callbacks.raise_on_all_ranks(run)
