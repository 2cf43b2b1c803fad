"""Set up a run: the settings are made final, then named stages build what trains, one after the other.

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
from horovod_volo.config.validation import RunFacts, config_warnings
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
from horovod_volo.monitor.logger import Logger
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


def setup(
    config: Config, world: World, stop: StopRequest, start: Start = FROM_DISK, task: Task | None = None
) -> tuple[TrainContext, list[str]]:
    """Build a run, stage by stage; return it with warnings. Collective: every rank calls this."""
    plan = settle(config, world, task)
    config, resources, classes = plan.config, plan.resources, len(plan.data.train.classes)
    begin_stage, slow = world.collectives.heartbeat.begin, LONGEST_WRITE_SECONDS

    begin_stage("looking for a checkpoint", slow)  # it is read as slowly as it is written
    checkpoint = None
    if start.take_over is None:
        checkpoint = checkpoint_to_resume(config, world, plan.task, plan.data.train)
    is_new = checkpoint is None and start.take_over is None

    begin_stage("building the network", slow if config.model.finetune else 0.0)
    finetune = config.model.finetune if is_new else ""
    build = partial(build_state, config, world, plan.task, num_classes=classes, finetune=finetune)
    state, warnings = world.run_on_all_ranks(partial(build, device=resources.device))

    begin_stage("checking kernels")
    warnings += choose_kernels(config.model.kernels, resources.device, config, state.model, classes, world)

    begin_stage("loading the state and copying it to all ranks", slow)
    if start.take_over is not None:
        start.take_over(state, world)
    else:
        warnings += restore_state(state, checkpoint, world)

    begin_stage("opening the run folder", _LOCK_SECONDS)
    logger, lock = world.run_on_all_ranks(partial(_open_folder, plan, world, state.step, start.job))

    begin_stage("starting to read data")
    with ExitStack() as after_error:  # a notebook may train into the folder when the mistake is corrected
        if lock is not None:
            after_error.callback(lock.close)
        after_error.callback(logger.close)
        context = build_context(plan, world, state, logger, stop)
        after_error.pop_all()
    context.lock = lock
    own = (context.folder / CHECKPOINTS).resolve()  # which other ranks may see under another name
    if world.broadcast_object(checkpoint is not None and checkpoint.resolve().parent == own):
        context.checkpoints.step = state.step  # it need not be saved again
    return context, [*_warnings(context), *warnings]


def _open_folder(plan: Plan, world: World, first_step: int, job: str) -> tuple[Logger, RunLock | None]:
    """Take the run folder's lock, and open the loggers, on rank 0."""
    if not world.is_rank_zero:
        return Logger(), None
    config, derived, folder = plan.config, plan.derived, run_folder(plan.config)
    try:
        lock = RunLock(folder, job)
        clean_up(folder / CHECKPOINTS)
        length = RunLength(first_step, derived.total_steps, derived.steps_per_epoch, config.run.eval_every)
        # Launchers prefix lines with the rank, which would break a progress line rewritten in place.
        live = world.launcher == "none"
        return RunLogger(folder, length, live=live, may_write=lock.check), lock
    except OSError as error:
        raise UserError(
            f"The run folder {folder} cannot be written: {error.strerror}. Give another --output."
        ) from None


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
    if config.model.compile:
        COMPILERS.find("inductor").check()
