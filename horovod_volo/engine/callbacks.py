"""Callbacks: what is called at fixed points of a run, on every rank and in the same order.

The engine calls the same points on all ranks, so a callback may use collectives. It may not wait for the
device at every step: that would stop the device from computing ahead.

Invariant: an error in a callback is printed where it occurs. It is not exchanged there, which would cost a
collective at every step: it asks all ranks to stop, and is raised on all of them when they have saved and
stopped. Until then all callbacks go on being called.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import TYPE_CHECKING, Any

from horovod_volo.cluster.collectives import HostsChangedError, RankLostError
from horovod_volo.cluster.launch_env import read_launch_env
from horovod_volo.core.errors import UserError, error_of_code, print_error, show
from horovod_volo.core.names import EXTRAS, Registry
from horovod_volo.plugins import callbacks_of_plugins

if TYPE_CHECKING:
    from horovod_volo.cluster.step_statistics import Outcome
    from horovod_volo.config.schema import Config
    from horovod_volo.engine.context import TrainContext
    from horovod_volo.engine.interrupts import StopRequest
    from horovod_volo.engine.task import Metrics
    from horovod_volo.monitor.logger import Values


class Callback:
    """Base class of callbacks: does nothing at any point. docs/python.md says what of a run is public."""

    def started(self, run: TrainContext) -> None:
        """Follow the set-up of a run, before its first step; after a resume `run.step` is above 0."""

    def step_done(self, run: TrainContext) -> None:
        """Follow a step, which `run.step` counts already."""

    def logged(self, run: TrainContext, values: Values) -> None:
        """Follow a log point, given the metrics of training since the last one."""

    def evaluated(self, run: TrainContext, metrics: Metrics) -> None:
        """Follow an evaluation, given its metrics."""

    def ended(self, run: TrainContext, *, finished: bool) -> None:
        """Follow the last step, or a stop on request (not `finished`); not called after an error."""

    # What follows is for the extras of this package.

    def close(self, run: TrainContext) -> None:
        """End what goes on, also after an error."""

    def step_agreed(self, run: TrainContext, outcome: Outcome) -> None:
        """Follow what all ranks agreed on in a step; with several GPUs, one step later."""

    def flush(self, run: TrainContext) -> None:
        """Write what was noted: at log points, before a checkpoint, and at the end."""

    def went_back(self, run: TrainContext) -> None:
        """Follow the return to an earlier step, `run.step`."""

    def ranks_lost(self, run: TrainContext) -> None:
        """Follow the loss of other ranks, or of their hosts: this set of ranks ends. Not collective."""


class StartAndEnd(Callback):
    """Notes the settings of a run that has begun, and the step at which it ends."""

    step = 0
    config: Config | None = None

    def started(self, run: TrainContext) -> None:
        self.config = run.config

    def ended(self, run: TrainContext, *, finished: bool) -> None:  # noqa: ARG002
        self.step = run.step


class Callbacks:
    """The callbacks of a run on one rank. One that failed is called too: other ranks may wait for it."""

    def __init__(self, callbacks: Sequence[Callback] = (), stop: StopRequest | None = None) -> None:
        self._callbacks, self._stop = callbacks, stop
        self.failed: UserError | None = None  # the first error
        self._printed: set[int] = set()  # numbers of the callbacks whose errors have been printed

    def raise_on_all_ranks(self, run: TrainContext) -> None:
        """Log the error of a callback on any rank, and raise it on every rank. Collective."""
        try:
            run.world.raise_on_all_ranks(self.failed)
        except UserError as error:
            run.log(f"error: {error}")
            # On the rank of the callback, the traceback shows where it failed.
            raise error from (None if self.failed is None else self.failed.__cause__)

    def _call(self, point: str, run: TrainContext, *values: Any, **facts: Any) -> None:
        for number, callback in enumerate(self._callbacks):
            try:
                getattr(callback, point)(run, *values, **facts)
            except (RankLostError, HostsChangedError):
                raise
            except Exception as error:  # a callback may raise anything
                if self._stop is not None:
                    self._stop.received = True
                if number not in self._printed:
                    self._printed.add(number)
                    failed = _failure(f"The callback {type(callback).__name__}", point, error)
                    self.failed = self.failed or failed
                    print_error(f"error on rank {read_launch_env().rank}: {failed}")
                    show("".join(traceback.format_exception(error)), end="", file=sys.stderr)

    # Each calls its point of all callbacks.
    started, ended = partialmethod(_call, "started"), partialmethod(_call, "ended")
    step_done, logged = partialmethod(_call, "step_done"), partialmethod(_call, "logged")
    evaluated, step_agreed = partialmethod(_call, "evaluated"), partialmethod(_call, "step_agreed")
    flush, went_back = partialmethod(_call, "flush"), partialmethod(_call, "went_back")
    ranks_lost, close = partialmethod(_call, "ranks_lost"), partialmethod(_call, "close")


# Callbacks that every run has, if their extra is installed, and what records the given steps for --profile.
STANDARD: Registry[Callable[[], Callback]] = Registry("callback of every run", "")
PROFILERS: Registry[Callable[[range], Callback]] = Registry("profiler", "--profile")


def parse_steps(text: str) -> range:
    """Return the steps of --profile, FIRST:LAST or steps=FIRST:LAST; the first step of a run is 1."""
    first, colon, last = text.removeprefix("steps=").partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()) or not 1 <= int(first) <= int(last):
        raise UserError(f"--profile takes steps=FIRST:LAST, such as steps=10:20, not {text!r}.")
    return range(int(first), int(last) + 1)


def standard_callbacks() -> list[Callback]:
    """Build the callbacks that every run has."""
    return [STANDARD.find(name)() for name in EXTRAS[STANDARD.kind] if STANDARD.has_extra(name)]


def build_plugin_callbacks(modules: str) -> list[Callback]:
    """Build the callbacks that the plugins have registered; raise UserError if one cannot be built."""
    callbacks = []
    for plugin, build in callbacks_of_plugins(modules):
        try:
            callback = build()
        except Exception as error:  # a plugin may raise anything
            raise _failure(f"A callback of the plugin {plugin}", "its constructor", error) from error
        if not isinstance(callback, Callback):
            raise UserError(
                f"The plugin {plugin} registered {type(callback).__name__}, which is no callback. Derive its "
                "class from horovod_volo.Callback."
            )
        callbacks.append(callback)
    return callbacks


def _failure(name: str, where: str, error: Exception) -> UserError:
    failed = error_of_code(f"{name} failed in {where}", error, "Correct it, or leave it out.")
    failed.__cause__ = error
    return failed
