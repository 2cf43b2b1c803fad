"""Everything that a training run uses on one rank, built once from its settings, the world and the state."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from horovod_volo.cluster.world import RankResources, World
from horovod_volo.config.derived import Derived, micro_batches
from horovod_volo.config.schema import Config
from horovod_volo.engine.callbacks import Callbacks
from horovod_volo.engine.checkpoint.files import CHECKPOINTS, CheckpointWriter
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.model_cost import ModelCost
from horovod_volo.engine.run_lock import RunLock
from horovod_volo.engine.state import TrainState
from horovod_volo.engine.task import Task, TaskData
from horovod_volo.monitor.logger import Logger
from horovod_volo.monitor.meters import LossMeter, StepTimer, StragglerFinder, TrainingClock
from horovod_volo.optim.clip import Clip, build_clip, gradient_norm
from horovod_volo.optim.loss_scale import SkippedSteps
from horovod_volo.optim.schedule import find_decay, lr_at


class Plan(NamedTuple):
    """The settings of a run, which do not change any more, and what they say of its data."""

    config: Config
    derived: Derived
    task: Task
    data: TaskData
    resources: RankResources
    cost: ModelCost = ModelCost()


@dataclass
class RunProgress:
    """What moves with the steps of a run, besides its state: measurements, and setbacks that are counted."""

    meter: LossMeter  # since the last log point
    timer: StepTimer  # likewise
    skipped: SkippedSteps
    clock: TrainingClock = field(default_factory=TrainingClock)
    stragglers: StragglerFinder | None = None  # on rank 0 of several
    logged_norm: Tensor | None = None  # of the gradients, at the step of a log point
    logged_bad_samples: set[str] = field(default_factory=set)
    skipped_in_a_row: int = 0  # steps, because a loss is not finite
    returns: int = 0  # to a checkpoint, because of such steps
    futile_returns: int = 0  # those since the last step that trained, and checkpoints saved since
    awaits_log_point: bool = False  # whether only the next one can tell that a step has trained
    repairs: int = 0  # returns to a checkpoint, because the state of ranks differed


class TrainContext:
    """One training run on one rank: the loop, the step and the checkpoints use it. Its attributes stay.

    Callbacks are given it. For them `config`, `world`, and what is documented below the constructor are
    public.
    """

    def __init__(
        self, plan: Plan, world: World, state: TrainState, logger: Logger, stop: StopRequest
    ) -> None:
        """Build the task's learner and the schedules of a run, given its state."""
        self.config, self.derived, self.task, self.data, self.resources, self.cost = plan
        self.world, self.state, self.logger, self.stop = world, state, logger, stop
        self.micro_batches = micro_batches(self.config, world.rank, world.size)  # numbers of those of a step
        device, reducer = self.resources.device, state.reducer
        self.learner = self.task.begin(self.config, world, self.data, self.resources, state.model)
        loader = self.learner.train_loader
        self.progress = RunProgress(
            LossMeter(self.learner.loss_names, device, lambda: loader.waited_seconds),
            StepTimer(device),
            SkippedSteps(state.scaler),
        )
        self.clip: Clip = build_clip(
            self.config.update.clip_mode,
            self.config.update.clip_grad,
            reducer.local_parameters,
            flat_gradients=reducer.local_gradients,
            heads=state.heads,
            global_grad_norm=reducer.global_grad_norm,
        )
        self.gradient_norm = partial(gradient_norm, reducer.local_gradients, reducer.global_grad_norm)
        self.lr = build_schedule(self.config, self.derived)  # lr(step)
        self.heartbeat = world.collectives.heartbeat
        self.checkpoints = CheckpointWriter()
        self.callbacks = Callbacks()
        self.hosts: Sequence[str] = ()  # of the ranks
        self.lock: RunLock | None = None  # of the run folder, on rank 0
        self.peak_flops = 0.0  # FLOP/s of the devices of all ranks together; 0: not known

    @property
    def folder(self) -> Path:
        return run_folder(self.config)

    @property
    def checkpoint_folder(self) -> Path:
        """Return the folder of the checkpoints, inside the run folder."""
        return self.folder / CHECKPOINTS

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

    def may_write(self) -> None:
        """Raise UserError if another process has taken over the run folder."""
        if self.lock is not None:
            self.lock.check()

    def request_stop(self) -> None:
        """Ask all ranks to save a checkpoint after the next step, or after this evaluation, and to stop."""
        self.stop.received = True

    def close(self) -> None:
        """Finish the checkpoint under way, stop the data threads and close all files."""
        with ExitStack() as closing:  # in the reverse order; all are closed even if one of them fails
            if self.lock is not None:
                closing.callback(self.lock.close)
            closing.callback(self.logger.close)
            closing.callback(self.learner.close)
            closing.callback(self.learner.train_loader.close)
            closing.callback(self.checkpoints.close)
            self.callbacks.flush(self)


def run_folder(config: Config) -> Path:
    """Return the folder of a run's results."""
    return Path(config.run.output) / config.run.name


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
