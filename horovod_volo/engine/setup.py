"""Sets up a run: the settings are made final, then named stages build what trains, one after the other.

Everything that can be checked is checked before the first file is written.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from horovod_volo.cluster.world import World, rank_resources
from horovod_volo.config.derived import derive, resolve
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import RunFacts, config_warnings, loggers
from horovod_volo.core.errors import UserError
from horovod_volo.core.operators import choose_kernels
from horovod_volo.engine.banner import batch_warnings
from horovod_volo.engine.callbacks import PROFILERS, parse_steps
from horovod_volo.engine.checkpoint.files import CHECKPOINTS, clean_up
from horovod_volo.engine.checkpoint.resuming import checkpoint_to_resume, restore_state
from horovod_volo.engine.checkpoint.saving import LONGEST_WRITE_SECONDS
from horovod_volo.engine.classification import TASKS
from horovod_volo.engine.context import Plan, TrainContext, build_context, run_folder
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.run_lock import RunLock
from horovod_volo.engine.state import TrainState, build_state
from horovod_volo.engine.task import Task
from horovod_volo.models.precision import precision_warnings
from horovod_volo.models.registry import COMPILERS
from horovod_volo.monitor.logger import Logger, NullLogger, check_packages
from horovod_volo.monitor.progress import RunLength
from horovod_volo.monitor.run_logger import RunLogger
from horovod_volo.plugins import check_names, load_plugins

_LOCK_SECONDS = 120.0  # the lock of another host is watched for a while


class Start(NamedTuple):
    """How a run begins. Ranks that take the place of others go on from a state in memory."""

    job: str = ""  # the name of these ranks and those before, whose lock of the run folder they may take over
    take_over: Callable[[TrainState, World], None] | None = None  # loads the state; collective


FROM_DISK = Start()  # from a checkpoint, or with fresh weights


def settle(config: Config, world: World, task: Task | None) -> Plan:
    """Make the settings final: complete them for the model, the ranks and the images. Collective."""
    begin_stage, resources = world.collectives.heartbeat.begin, rank_resources(world)
    begin_stage("importing plugins")

    def complete() -> tuple[Task, Config, Config]:
        load_plugins(config.run.plugin)
        chosen = task or _task_of(config)
        stated = chosen.complete(config)
        resolved = resolve(stated, world.size)
        _check(resolved)
        return chosen, stated, resolved

    task, stated, config = world.run_on_all_ranks(complete)
    begin_stage("listing the data")
    data = task.read(config, world)
    images = len(data.train)
    if config.chooses_model:
        chosen = task.choose(stated, images, world.size, resources.device)
        config = resolve(world.broadcast_object(chosen), world.size)  # GPUs of ranks may differ
    derived = world.run_on_all_ranks(partial(derive, config, ranks=world.size, images=images))
    return Plan(config, derived, task, data, resources)


class Setup:
    """The stages of the set-up, and what they have built. Every rank calls them: all are collective."""

    def __init__(self, plan: Plan, world: World, stop: StopRequest, start: Start) -> None:
        self._plan, self._world, self._stop, self._start = plan, world, stop, start
        self._classes = len(plan.data.train.classes)
        self._checkpoint: Path | None = None
        self.warnings: list[str] = []  # about the state and its kernels

    def run(self) -> TrainContext:
        """Go through the stages."""
        begin_stage = self._world.collectives.heartbeat.begin
        slow = LONGEST_WRITE_SECONDS  # a checkpoint is read as slowly as it is written
        begin_stage("looking for a checkpoint", slow)
        self.find_checkpoint()
        begin_stage("building the network", slow if self._plan.config.model.finetune else 0.0)
        state = self.build_state()
        begin_stage("checking kernels")
        self.choose_kernels(state)
        begin_stage("loading the state and copying it to all ranks", slow)
        self.load(state)
        begin_stage("opening the run folder", _LOCK_SECONDS)
        logger, lock = self.open_folder(state)
        begin_stage("starting to read data")
        return self.build_context(state, logger, lock)

    def find_checkpoint(self) -> None:
        """Find the checkpoint to resume from, and check that it is of this run."""
        if self._start.take_over is None:
            plan = self._plan
            self._checkpoint = checkpoint_to_resume(plan.config, self._world, plan.task, plan.data.train)

    def build_state(self) -> TrainState:
        """Build the network, with weights to begin with if a new run names some, and its optimizer."""
        plan = self._plan
        goes_on = self._checkpoint is not None or self._start.take_over is not None
        build = partial(build_state, plan.config, self._world, plan.task, num_classes=self._classes)
        finetune = "" if goes_on else plan.config.model.finetune
        state, self.warnings = self._world.run_on_all_ranks(
            partial(build, device=plan.resources.device, finetune=finetune)
        )
        return state

    def choose_kernels(self, state: TrainState) -> None:
        """Choose between hand-written kernels and PyTorch's operators."""
        config, device = self._plan.config, self._plan.resources.device
        facts = config, state.model, self._classes, self._world
        self.warnings += choose_kernels(config.model.kernels, device, *facts)

    def load(self, state: TrainState) -> None:
        """Load the state of ranks before, or of a checkpoint; copy it, or fresh weights, to all ranks."""
        if self._start.take_over is not None:
            self._start.take_over(state, self._world)
        else:
            self.warnings += restore_state(state, self._checkpoint, self._world)

    def open_folder(self, state: TrainState) -> tuple[Logger, RunLock | None]:
        """Take the run folder's lock, and open the loggers, on rank 0."""
        return self._world.run_on_all_ranks(partial(self._open_folder, state.step))

    def build_context(self, state: TrainState, logger: Logger, lock: RunLock | None) -> TrainContext:
        """Start to read data."""
        world = self._world
        with ExitStack() as after_error:  # a notebook may train into the folder when the mistake is corrected
            if lock is not None:
                after_error.callback(lock.close)
            after_error.callback(logger.close)
            context = build_context(self._plan, world, state, logger, self._stop)
            after_error.pop_all()
        context.lock = lock
        own = (context.folder / CHECKPOINTS).resolve()  # which other ranks may see under another name
        is_own = self._checkpoint is not None and self._checkpoint.resolve().parent == own
        if world.broadcast_object(is_own):
            context.checkpoints.step = state.step  # it need not be saved again
        return context

    def _open_folder(self, first_step: int) -> tuple[Logger, RunLock | None]:
        config, derived, folder = self._plan.config, self._plan.derived, run_folder(self._plan.config)
        if not self._world.is_rank_zero:
            return NullLogger(), None
        try:
            lock = RunLock(folder, self._start.job)
            clean_up(folder / CHECKPOINTS)
            length = RunLength(
                first_step, derived.total_steps, derived.steps_per_epoch, config.run.eval_every
            )
            # Launchers prefix lines with the rank, which would break a progress line rewritten in place.
            live = self._world.launcher == "none"
            logger = RunLogger(folder, length, live=live, settings=config.logging)
            logger.may_write = lock.check
            return logger, lock
        except OSError as error:
            raise UserError(
                f"The run folder {folder} cannot be written: {error.strerror}. Give another --output."
            ) from None


def setup(
    config: Config, world: World, stop: StopRequest, start: Start = FROM_DISK, task: Task | None = None
) -> tuple[TrainContext, list[str]]:
    """Settle the settings and build the run; return it with warnings. Collective: every rank calls this."""
    stages = Setup(settle(config, world, task), world, stop, start)
    context = stages.run()
    return context, [*_warnings(context), *stages.warnings]


def _warnings(context: TrainContext) -> list[str]:
    config, derived, device = context.config, context.derived, context.resources.device
    facts = RunFacts(context.world.size, device.type, context.state.step, derived.total_steps)
    return [
        *config_warnings(config, facts),
        *context.data.warnings(config),
        *batch_warnings(config, derived, len(context.data.train)),
        *precision_warnings(config.model.precision, device),
    ]


def _task_of(config: Config) -> Task:
    if not config.data.data_dir:
        raise UserError("The data folder is missing: python -m horovod_volo.train DATA_DIR ...")
    return TASKS.find(config.model.task)


def _check(config: Config) -> None:
    for flag, file in (
        ("autotune", config.launch.horovod_autotune),
        ("timeline", config.launch.horovod_timeline),
    ):
        if file and not Path(file).parent.is_dir():
            raise UserError(
                f"--horovod-{flag} {file}: the folder {Path(file).parent} does not exist. Create it first."
            )
    check_names(config)
    if config.run.profile:
        parse_steps(config.run.profile)
        PROFILERS.find("steps")
    check_packages(loggers(config.logging))
    if config.model.compile:
        COMPILERS.find("inductor").check()
