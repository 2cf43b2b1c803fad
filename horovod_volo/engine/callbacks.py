"""Callbacks: what is called at five fixed points of a run, on every rank and in the same order.

The engine calls the same points on all ranks, so a callback may use collectives. It may not wait for the
device at every step: that would stop the device from computing ahead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from horovod_volo.engine.context import TrainContext
    from horovod_volo.monitor.progress import Values
    from horovod_volo.tasks.task import Metrics


class Callback:
    """Base class of callbacks: does nothing at any point."""

    def started(self, run: TrainContext) -> None:
        """Follow the set-up of a run, before its first step; after a resume `run.state.step` is above 0."""

    def step_done(self, run: TrainContext) -> None:
        """Follow a step, which `run.state.step` counts already."""

    def logged(self, run: TrainContext, values: Values) -> None:
        """Follow a log point, given the metrics of training since the last one."""

    def evaluated(self, run: TrainContext, metrics: Metrics) -> None:
        """Follow an evaluation, given its metrics."""

    def ended(self, run: TrainContext, *, finished: bool) -> None:
        """Follow the last step, or a stop on request (not `finished`); not called after an error."""
