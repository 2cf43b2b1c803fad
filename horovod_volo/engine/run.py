"""One training run: set it up, train to the end or to a stop request, and close what it has opened.

The set-up makes the settings final, then named stages build what trains, one after the other. Everything that
can be checked is checked before the first file is written.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple
from uuid import uuid4

import torch

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.collectives import HostsChangedError, RankLostError
from horovod_volo.cluster.launch_env import OWN
from horovod_volo.cluster.watchdog import Watchdog
from horovod_volo.cluster.world import World, rank_resources
from horovod_volo.config.derived import derive, resolve
from horovod_volo.config.recipe import dump, with_absolute_folder
from horovod_volo.config.schema import ON_CPU, ONE_RANK, RESUMED, Config
from horovod_volo.config.validation import config_warnings
from horovod_volo.core.environment import collect_environment
from horovod_volo.core.errors import UserError
from horovod_volo.core.names import Registry
from horovod_volo.core.operators import choose_kernels
from horovod_volo.data.images import catalog_file
from horovod_volo.engine.banner import banner, batch_warnings, describe_run, format_lines
from horovod_volo.engine.callbacks import PROFILERS, Callback, Callbacks, build_plugin_callbacks, parse_steps
from horovod_volo.engine.checkpoint import files
from horovod_volo.engine.checkpoint.resuming import checkpoint_to_resume, restore_state
from horovod_volo.engine.checkpoint.saving import LONGEST_WRITE_SECONDS
from horovod_volo.engine.classification import TASKS
from horovod_volo.engine.context import Plan, TrainContext, run_folder
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.loop import fit
from horovod_volo.engine.model_cost import count_cost, refuse_long_run, refuse_many_images
from horovod_volo.engine.run_lock import RunLock
from horovod_volo.engine.state import TrainState, build_state
from horovod_volo.engine.task import Task
from horovod_volo.models.compiled import check_compiler
from horovod_volo.models.precision import compute_reproducibly, precision_warnings
from horovod_volo.monitor.logger import METRICS, Logger, last_values
from horovod_volo.monitor.meters import StragglerFinder, TrainingClock, peak_flops
from horovod_volo.monitor.progress import RunLength
from horovod_volo.monitor.run_logger import RunLogger
from horovod_volo.plugins import check_names, load_plugins


class Start(NamedTuple):
    """How a run begins. Ranks that take the place of others go on from a state in memory."""

    job: str = ""  # the name of these ranks and those before, whose lock of the run folder they may take over
    in_job: Callable[[], bool] = lambda: True  # whether it is these ranks' turn: others may have gone on
    take_over: Callable[[TrainState, World], None] | None = None  # loads the state; collective
    begun: bool = False  # before: its own checkpoint, if there is one, is resumed, not that of --resume


FROM_DISK = Start()  # from a checkpoint, or with fresh weights


def settle(config: Config, world: World, start: Start) -> Plan:
    """Make the settings final: complete them for the model, the ranks and the images. Collective."""
    begin_stage, resources = world.collectives.heartbeat.begin, rank_resources(world, config.launch.device)
    if config.data.reproducible:
        compute_reproducibly(resources.device)
    begin_stage("importing plugins")

    def complete() -> tuple[Task, Config, Config]:
        load_plugins(config.run.plugin)
        if not config.data.data_dir:
            raise UserError("The data folder is missing: horovod-volo train DATA_DIR ...")
        task = TASKS.find(config.model.task)
        stated = task.complete(config)
        resolved = resolve(stated, world.size)
        _check(resolved)
        return task, stated, resolved

    task, stated, config = world.run_on_all_ranks(complete)
    fell_back = resources.device.type == "cpu" and config.launch.device == "auto"
    may_be_long = fell_back and start.take_over is None
    if may_be_long and not config.chooses_model:
        world.run_on_rank_zero(partial(refuse_many_images, config, task, world.size, resources.threads))
    begin_stage("listing the data")
    data = task.read(config, world)
    images, classes = len(data.train), len(data.train.classes)
    if config.chooses_model:
        choose = partial(task.choose, stated, images, world.size, resources.device)
        config = resolve(world.run_on_rank_zero(choose), world.size)  # GPUs of ranks may differ
    derived = world.run_on_all_ranks(partial(derive, config, ranks=world.size, images=images))
    cost = world.run_on_rank_zero(partial(count_cost, config, task, classes))
    if may_be_long:
        refuse = partial(refuse_long_run, config, cost, world.size, resources.threads, images)
        world.run_on_rank_zero(refuse)
    return Plan(config, derived, task, data, resources, cost)


def setup(
    config: Config, world: World, stop: StopRequest, start: Start = FROM_DISK
) -> tuple[TrainContext, list[str]]:
    """Build a run, stage by stage; return it with warnings. Collective: every rank calls this."""
    plan = settle(config, world, start)
    config, resources, classes = plan.config, plan.resources, len(plan.data.train.classes)
    begin_stage, slow = world.collectives.heartbeat.begin, LONGEST_WRITE_SECONDS

    begin_stage("looking for a checkpoint", slow)  # it is read as slowly as it is written
    checkpoint = None
    if start.take_over is None:
        checkpoint = checkpoint_to_resume(config, world, plan.task, plan.data.train, start.begun)
    is_new = checkpoint is None and start.take_over is None

    begin_stage("building the network", slow if config.model.finetune else 0.0)
    # The other ranks receive the state of rank 0, which alone may have to download the weights.
    finetune = config.model.finetune if is_new and world.is_rank_zero else ""
    build = partial(build_state, config, world, plan.task, num_classes=classes, finetune=finetune)
    state, warnings = world.run_on_all_ranks(partial(build, device=resources.device))

    begin_stage("checking kernels")
    warnings += choose_kernels(config.model.kernels, resources.device, config, state.model, classes, world)

    begin_stage("loading the state and copying it to all ranks", slow)
    if start.take_over is not None:
        start.take_over(state, world)
    else:
        warnings += restore_state(state, checkpoint, world)

    begin_stage("opening the run folder", slow)  # later checkpoints may be read
    logger, lock = world.run_on_all_ranks(partial(_open_folder, plan, world, state.step, start))

    begin_stage("starting to read data")
    with ExitStack() as after_error:  # a notebook may train into the folder when the mistake is corrected
        if lock is not None:
            after_error.callback(lock.close)
        after_error.callback(logger.close)
        context = TrainContext(plan, world, state, logger, stop)
        after_error.pop_all()
    context.lock = lock
    own = context.checkpoint_folder.resolve()  # which other ranks may see under another name
    if world.broadcast_object(checkpoint is not None and checkpoint.resolve().parent == own):
        context.checkpoints.step = state.step  # it need not be saved again
    return context, [*_warnings(context), *warnings]


def _open_folder(plan: Plan, world: World, first_step: int, start: Start) -> tuple[Logger, RunLock | None]:
    """Take the run folder's lock, and open the loggers, on rank 0."""
    if not world.is_rank_zero:
        return Logger(), None
    config, derived, folder = plan.config, plan.derived, run_folder(plan.config)
    length = RunLength(first_step, derived.total_steps, derived.steps_per_epoch, config.run.eval_every)
    live = world.launcher in ("none", OWN)  # others prefix each line: none can be rewritten in place
    try:
        with ExitStack() as after_error:
            lock = RunLock(folder, start.job, start.in_job)
            after_error.callback(lock.close)
            files.clean_up(folder / files.CHECKPOINTS)
            resumed = files.checkpoint_path(folder / files.CHECKPOINTS, first_step)
            if intact := [path for path, damage in files.find_later(resumed).items() if not damage]:
                raise UserError(f"{intact[-1]} was saved while this run was starting. Start it again.")
            if resumed.exists():  # `last` may be of an earlier step after a kill, of a later damaged one
                files.update_link(resumed.with_name("last"), resumed, lock.check)
            logger = RunLogger(folder, length, live=live, may_write=lock.check)
            after_error.pop_all()
            return logger, lock
    except OSError as error:
        raise UserError(
            f"The run folder {folder} cannot be written: {error.strerror}. Give another --output."
        ) from None


def _warnings(context: TrainContext) -> list[str]:
    config, derived, device = context.config, context.derived, context.resources.device
    facts = {ONE_RANK: context.world.size == 1, ON_CPU: device.type == "cpu", RESUMED: context.state.step}
    return [
        *config_warnings(config, [fact for fact, holds in facts.items() if holds]),
        *(context.data.warnings(config) if context.world.is_rank_zero else ()),  # it reads label maps
        *batch_warnings(config, derived, len(context.data.train)),
        *precision_warnings(config.model.precision, device),
    ]


def _check(config: Config) -> None:
    check_names(config)
    if config.run.profile:
        parse_steps(config.run.profile)
        PROFILERS.find("steps")
    if config.model.compile:
        check_compiler()


# (settings, world, callbacks, start) -> exit status
Train = Callable[[Config, World, Sequence[Callback], Start], int]
# Other ways to start ranks than once: each calls `Train` with every set of ranks.
LAUNCHES: Registry[Callable[[Config, Watchdog, Binding, Train], int]] = Registry(
    "way to start ranks", "--elastic"
)


def run(
    config: Config,
    world: World,
    stop: StopRequest,
    watchdog: Watchdog,
    callbacks: Sequence[Callback] = (),
    start: Start = FROM_DISK,
) -> bool:
    """Train; return False if a stop was requested before the last step. Collective: every rank calls this."""
    hosts = _watch_ranks(config, world, watchdog)
    begin_stage = watchdog.heartbeat.begin
    context, warnings = setup(config, world, stop, start)
    config = context.config
    profiled = [PROFILERS.find("steps")(parse_steps(config.run.profile))] if config.run.profile else []
    try:
        begin_stage("starting callbacks and loggers")
        context.hosts = hosts
        if world.is_rank_zero and world.size > 1:
            context.progress.stragglers = StragglerFinder(hosts)
        of_plugins = world.run_on_all_ranks(partial(build_plugin_callbacks, config.run.plugin))
        context.callbacks = Callbacks([*profiled, *callbacks, *of_plugins], stop)
        log_start(context, warnings, shown=start.take_over is None)
        context.callbacks.started(context)
        context.callbacks.raise_on_all_ranks(context)
        before = world.run_on_rank_zero(lambda: last_values(context.folder / METRICS))
        context.progress.skipped.total = before.get("skipped_steps", 0)
        context.progress.clock = TrainingClock(before.get("hours", 0.0))
        context.heartbeat.beat(context.state.step)
        finished = fit(context)
        context.callbacks.raise_on_all_ranks(context)
        if finished:
            context.logger.finish(context.state.step)
        context.callbacks.ended(context, finished=finished)
        context.callbacks.raise_on_all_ranks(context)
        context.logger.log(end_message(context, finished))
        return finished
    except (RankLostError, HostsChangedError):
        begin_stage("keeping its state")
        context.callbacks.ranks_lost(context)
        raise
    finally:
        begin_stage("closing its files", LONGEST_WRITE_SECONDS)
        context.callbacks.close(context)
        context.close()


def _watch_ranks(config: Config, world: World, watchdog: Watchdog) -> list[str]:
    """Let the watchdog end the run if a stage or a step does not; return the ranks' hosts. Collective."""
    world.collectives.heartbeat = watchdog.heartbeat
    catalog_file.note_progress = watchdog.heartbeat.beat
    hosts = world.hosts()
    name = world.broadcast_object(f"{hosts[0]}-{os.getpid()}-{uuid4().hex[:8]}")  # of this set of ranks
    watchdog.watch_ranks(world.rank, hosts, run_folder(config) / "hang" / name)
    return hosts


def log_start(context: TrainContext, warnings: list[str], *, shown: bool = True) -> None:
    """Log the banner, write `resolved.toml` and `environment.json`. Collective: every rank calls this."""
    bindings = context.world.allgather_object(str(context.resources))
    warnings_of_ranks = context.world.allgather_object(context.world.binding.warnings)
    binding_warnings = dict.fromkeys(text for texts in warnings_of_ranks for text in texts)  # each once
    properties = banner(context, context.hosts)
    if shown:
        context.logger.log(*format_lines(properties, [*binding_warnings, *warnings]))
    _note_peak(context)
    context.logger.describe(context.state.step, partial(describe_run, context))
    context.logger.write_file("resolved.toml", dump(with_absolute_folder(context.config)))
    environment = collect_environment() | {"hosts": context.hosts, "bindings": bindings, "banner": properties}
    context.logger.write_file("environment.json", json.dumps(environment, indent=2))


def _note_peak(context: TrainContext) -> None:
    """Note the peak of the devices. Collective: every rank calls this."""
    world, device, precision = context.world, context.resources.device, context.config.model.precision
    if context.cost.problem:
        context.logger.log(f"the operations of the network are not counted: {context.cost.problem}")
    if device.type != "cuda":
        return
    gpu = torch.cuda.get_device_name(device)
    peaks = world.allgather_object((gpu, peak_flops(gpu, precision)))
    if unknown := sorted({name for name, peak in peaks if not peak}):
        gpus = " and ".join(unknown)
        context.logger.log(f"the peak of {gpus} in {precision} is not known: MFU is not logged")
    else:
        context.peak_flops = sum(peak for _, peak in peaks)


def end_message(context: TrainContext, finished: bool) -> str:
    """Return the last line of the log; the scripts in jobs/ look for its first words."""
    step, total = context.state.step, context.derived.total_steps
    if finished:
        patience = context.config.run.early_stop
        none_better = f"{patience} evaluations in a row were no better than the best (--early-stop)"
        why = f" of {total}, because {none_better}"
        best = context.checkpoint_folder / "best"
        return f"done: {step} steps{why if step < total else ''}; best weights in {best}"
    if context.checkpoints.step < 0:
        return "stopped at step 0 and saved nothing: the same command starts again"
    why = ", because of --stop-at-step" if step == context.config.run.stop_at_step else ""
    return f"stopped at step {step} and saved{why}; resume with --resume auto"
