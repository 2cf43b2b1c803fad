"""Time that logging takes of an epoch of the demo: everything that can be logged, against nothing.

One run trains for as many steps as there are between two log points, in turn with its logger and with one
that does nothing: two runs differ even if neither logs anything. What is logged once in an
epoch, which are pictures, histograms and an evaluation, is timed by itself and added. Processor time counts
all threads, so that it also has what does not hold the loop up.
"""

from __future__ import annotations

import gc
import io
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import closing, redirect_stdout
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray

from horovod_volo.bench.cli import Flag, Pairs
from horovod_volo.bench.comparison import one_thread
from horovod_volo.bench.results import Figure, Result
from horovod_volo.cluster.world import World
from horovod_volo.config.command_line import parse
from horovod_volo.demo.demo_set import make_demo_set
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.log_point import log_point
from horovod_volo.engine.loop import garbage_collected_at_log_points, note_outcomes
from horovod_volo.engine.model_cost import count_cost
from horovod_volo.engine.run_texts import describe_run
from horovod_volo.engine.setup import setup
from horovod_volo.engine.step import train_step
from horovod_volo.engine.step_record import log_histograms
from horovod_volo.engine.task import Batch
from horovod_volo.monitor.logger import NullLogger

_EPOCHS = "1000"  # more than are trained
_SCORES = {
    "top1": 50.0,
    "top5": 90.0,
    "loss": 1.0,
    "images": 1000,
    "bad_samples": 0,
    "hours": 1.0,
    "epoch": 1,
}
_REPEATS = 5

Seconds = NDArray[np.float64]


def measure(
    *,
    images: Annotated[int, Flag("training images of an epoch")] = 4000,
    read_images: Annotated[int, Flag("images to draw, which are read again and again")] = 400,
    pairs: Pairs = 20,
) -> Result:
    """Compare intervals between log points of one rank."""
    with tempfile.TemporaryDirectory() as name, redirect_stdout(io.StringIO()), one_thread():
        folder = Path(name)
        make_demo_set(folder / "data", train=read_images, val=10)
        with closing(_context(folder)) as context:
            every = context.config.run.log_every
            intervals = images / context.derived.global_batch / every
            run = _MeasuredRun(context)
            seconds = np.empty((2, 4, pairs))  # (side, columns of an interval, pair)
            with garbage_collected_at_log_points():
                for logs in (True, False):
                    run.interval(logs=logs)  # the first one fills caches
                for pair in range(pairs):
                    for number in (0, 1) if pair % 2 == 0 else (1, 0):
                        seconds[number, :, pair] = run.interval(logs=number == 0)
                once = _once_per_epoch(run)
    steps = f"{every} steps"
    figures = [
        Figure.of_seconds(f"{steps}, everything logged", seconds[0, 0]),
        Figure.of_seconds(f"{steps}, nothing logged", seconds[1, 0]),
        Figure.of_seconds("pictures, histograms and evaluation, once in an epoch", once[0]),
    ]
    at_log_points = seconds[0, 2:] - seconds[1, 2:]  # without the collection of garbage
    figures.append(Figure.of_seconds("a log point, processor time", at_log_points[1]))
    for number, clock in enumerate(("wall", "processor")):
        share = at_log_points[number] / seconds[1, number]
        share += np.median(once[number]) / (intervals * seconds[1, number])
        label = f"log points and what is logged once, of the {clock} time of an epoch"
        figures.append(Figure.of(label, 100 * share, "%"))
    for number, clock in enumerate(("wall", "processor")):
        all_logged, nothing = seconds[:, number]
        share = (all_logged - nothing) / nothing + np.median(once[number]) / (intervals * nothing)
        figures.append(
            Figure.of(f"whole intervals, paired: of the {clock} time of an epoch", 100 * share, "%")
        )
    title = f"all logging of the demo, {images:,} images an epoch, one rank, cpu"
    return Result("logging", title, figures)


def _context(folder: Path) -> TrainContext:
    """Build a run of the demo that logs everything."""
    labels = ["--token-label-data", str(folder / "data" / "token_labels"), "--ground-truth"]
    logged = ["--log-to", "csv", "--histograms-every", "1", "--images-every", "1", "--ema-decay", "0.99"]
    where = ["--output", str(folder / "runs"), "--name", "all", "--epochs", _EPOCHS]
    config = parse([str(folder / "data"), "--recipe", "demo", *labels, *logged, *where]).config
    context, _ = setup(config, World.single(), StopRequest())
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other would hide the difference
    context.cost = count_cost(context.config, context.task, len(context.data.train.classes))
    context.logger.describe(0, partial(describe_run, context, ["host"], ["cpu; "]))
    return context


class _MeasuredRun:
    """A run that is trained for an interval at a time, with its logger or without one."""

    def __init__(self, context: TrainContext) -> None:
        self.context = context
        self._loggers = {True: context.logger, False: NullLogger()}
        self.batches = self._batches()

    def _batches(self) -> Iterator[Batch]:
        for epoch in itertools.count():
            yield from self.context.learner.train_loader.batches(epoch, 0)

    def interval(self, *, logs: bool) -> tuple[float, float, float, float]:
        """Train to the next log point; return wall and processor time, and those of the log point in them."""
        context = self.context
        context.logger = self._loggers[logs]
        context.progress.meter.reset()
        context.progress.timer.reset()
        wall, processor = perf_counter(), process_time()
        for _ in range(context.config.run.log_every):
            train_step(context, self.batches)
            note_outcomes(context, of_all=True)
            context.logger.step_done(context.state.step)
        wall_before, processor_before = perf_counter(), process_time()
        if logs:
            log_point(context)
        else:
            gc.collect()  # the loop does so at each log point, whether or not it logs anything
        wall_after, processor_after = perf_counter(), process_time()
        context.logger = self._loggers[True]
        return (
            wall_after - wall,
            processor_after - processor,
            wall_after - wall_before,
            processor_after - processor_before,
        )


def _once_per_epoch(run: _MeasuredRun) -> Seconds:
    """Return wall and processor time (2, repeats) of what is logged once in an epoch."""
    seconds = np.array([_seconds_once(run) for _ in range(_REPEATS + 1)])
    return seconds[1:].T  # the first time, fonts are loaded


def _seconds_once(run: _MeasuredRun) -> tuple[float, float]:
    context, batch, step = run.context, next(run.batches), run.context.state.step
    for parameter in context.state.reducer.local_parameters.values():
        parameter.grad = parameter.detach().clone()
    wall, processor = perf_counter(), process_time()
    context.logger.log_pictures(step, "training", partial(context.learner.training_pictures, batch, step))
    log_histograms(context)
    context.logger.log_evaluation(step, dict(_SCORES))
    seconds = perf_counter() - wall, process_time() - processor
    for parameter in context.state.reducer.local_parameters.values():
        parameter.grad = None
    return seconds
