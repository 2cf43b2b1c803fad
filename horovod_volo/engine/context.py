"""Everything that a training run uses on one rank, built once from its settings, the world and the state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from horovod_volo.cluster.resources import RankResources
from horovod_volo.cluster.watchdog_process import Heartbeat
from horovod_volo.cluster.world import World
from horovod_volo.config.derived import Derived, derive
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.engine.callbacks import Callbacks
from horovod_volo.engine.checkpoint.writer import CheckpointWriter
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.ledger import LEDGER, Ledger, LedgerStart, write_classes
from horovod_volo.engine.model_cost import UNKNOWN_COST, ModelCost
from horovod_volo.engine.run_lock import RunLock
from horovod_volo.engine.state import TrainState
from horovod_volo.engine.task import Task, TaskData, TaskRun
from horovod_volo.monitor.logger import Logger
from horovod_volo.monitor.meters import LossMeter, StepTimer, StragglerFinder, TrainingClock
from horovod_volo.optim.clip import Clip, build_clip, gradient_norm
from horovod_volo.optim.loss_scale import SkippedSteps
from horovod_volo.optim.schedule import find_decay, lr_at


@dataclass
class TrainContext:
    """One training run on one rank: the loop, the step and the checkpoints use it.

    Callbacks are given it. For them `config`, `world`, and what is documented below the fields are public.
    """

    config: Config
    world: World
    resources: RankResources
    derived: Derived
    task: Task
    data: TaskData
    state: TrainState
    parts: TaskRun
    meter: LossMeter  # since the last log point
    timer: StepTimer  # likewise
    clip: Clip
    gradient_norm: Callable[[], Tensor]
    lr: Callable[[int], float]  # lr(step)
    stop: StopRequest
    logger: Logger
    ledger: Ledger
    skipped: SkippedSteps
    clock: TrainingClock = field(default_factory=TrainingClock)
    cost: ModelCost = UNKNOWN_COST  # of the network
    peak_flops: float = 0.0  # FLOP/s of the devices of all ranks together; 0: not known
    lock: RunLock | None = None  # of the run folder, on rank 0
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    checkpoints: CheckpointWriter = field(default_factory=CheckpointWriter)
    skipped_in_a_row: int = 0  # steps, because a loss is not finite
    returns: int = 0  # to a checkpoint, because of such steps
    wants_histograms: bool = False  # of the next step
    logged_norm: Tensor | None = None  # of the gradients, at the step of a log point
    recent: dict[str, list[float]] = field(default_factory=dict)  # values of the last log points, by name
    returns_in_vain: int = 0  # of them, those after which no step had a finite loss
    repairs: int = 0  # returns to a checkpoint, because the state of ranks differed
    hosts_changed: Callable[[], bool] = lambda: False  # whether an elastic job has other hosts now
    stragglers: StragglerFinder | None = None  # on rank 0 of several
    logged_bad_samples: set[str] = field(default_factory=set)
    callbacks: Callbacks = field(default_factory=Callbacks)

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return run_folder(self.config)

    @property
    def step(self) -> int:
        """Return the number of steps taken since the start of the run, earlier processes included."""
        return self.state.step

    @property
    def total_steps(self) -> int:
        """Return the number of steps of the whole run."""
        return self.derived.total_steps

    @property
    def epoch(self) -> float:
        """Return the number of epochs done, such as 0.5."""
        return self.state.step / self.derived.steps_per_epoch

    @property
    def model(self) -> nn.Module:
        """Return the network that is trained. Its parameters are the same on all ranks after each step."""
        return self.state.model

    def log(self, *lines: str) -> None:
        """Print lines and append them to log.txt, on rank 0."""
        self.logger.log(*lines)

    def request_stop(self) -> None:
        """Ask all ranks to save a checkpoint after the next step, or after this evaluation, and to stop."""
        self.stop.received = True

    def close(self) -> None:
        """Finish the checkpoint under way, stop the data threads and close all files."""
        with ExitStack() as closing:  # in the reverse order; all are closed even if one of them fails
            if self.lock is not None:
                closing.callback(self.lock.close)
            closing.callback(self.logger.close)
            closing.callback(self.parts.close)
            closing.callback(self.parts.train_loader.close)
            closing.callback(self.checkpoints.close)
            with suppress(UserError):  # another process has taken over the run folder
                self.ledger.write()


def run_folder(config: Config) -> Path:
    """Return the folder of a run's results."""
    return Path(config.run.output) / config.run.name


def build_context(
    config: Config,
    world: World,
    task: Task,
    data: TaskData,
    resources: RankResources,
    state: TrainState,
    logger: Logger,
    stop: StopRequest,
) -> TrainContext:
    """Build the task's parts and the schedules of a run, given its state."""
    derived = derive(config, ranks=world.size, images=len(data.train))
    parts = task.begin(config, world, data, resources, state.model)
    loader, reducer = parts.train_loader, state.reducer
    return TrainContext(
        config=config,
        world=world,
        resources=resources,
        derived=derived,
        task=task,
        data=data,
        state=state,
        parts=parts,
        meter=LossMeter(parts.loss_names, resources.device, lambda: loader.waited_seconds),
        timer=StepTimer(resources.device),
        clip=build_clip(
            config.update.clip_mode,
            config.update.clip_grad,
            reducer.local_parameters,
            flat_gradients=reducer.local_gradients,
            heads=task.heads(config),
            global_grad_norm=reducer.global_grad_norm,
        ),
        gradient_norm=partial(gradient_norm, reducer.local_gradients, reducer.global_grad_norm),
        lr=build_schedule(config, derived),
        stop=stop,
        logger=logger,
        ledger=_build_ledger(config, world, data, derived, parts.classes),
        skipped=SkippedSteps(state.scaler),
        heartbeat=world.collectives.heartbeat,
    )


def _build_ledger(
    config: Config, world: World, data: TaskData, derived: Derived, classes: NDArray[np.int32] | None
) -> Ledger:
    start = LedgerStart(
        seed=config.run.seed,
        images=len(data.train),
        block_shuffle=config.data.block_shuffle,
        shuffle_window=config.data.shuffle_window,
        global_batch=derived.global_batch,
        steps_per_epoch=derived.steps_per_epoch,
        ranks=world.size,
        balance=0.0 if classes is None else config.data.balance,
    )
    if classes is not None and world.is_rank_zero:
        write_classes(run_folder(config), classes)
    return Ledger(run_folder(config) / LEDGER if world.is_rank_zero else None, start)


def build_schedule(config: Config, derived: Derived) -> Callable[[int], float]:
    """Return the learning rate as a function of the step."""
    return partial(
        lr_at,
        decay=find_decay(config.update),
        peak=derived.peak_lr,
        start=derived.warmup_lr,
        floor=derived.min_lr,
        warmup=derived.warmup_steps,
        decay_steps=derived.decay_steps,
        prefix=derived.prefix_steps,
        stride=derived.steps_per_epoch if config.update.lr_changes == "epoch" else 1,
    )
