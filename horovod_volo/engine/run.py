"""One training run: check the settings, build everything, train to the end or to a stop request.

Everything that can be checked is checked before the first file is written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import torch

from horovod_volo.cluster.collectives import RankLostError
from horovod_volo.cluster.resources import rank_resources
from horovod_volo.cluster.watchdog import Watchdog
from horovod_volo.cluster.world import World
from horovod_volo.config.derived import Derived, derive, resolve
from horovod_volo.config.recipe import dump
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import RunFacts, config_warnings, loggers
from horovod_volo.core.environment import collect_environment
from horovod_volo.core.errors import UserError
from horovod_volo.elastic.job import HostsChangedError
from horovod_volo.elastic.run import ElasticRun
from horovod_volo.engine.banner import batch_warnings, format_banner
from horovod_volo.engine.callbacks import Callback, Callbacks, build_plugin_callbacks
from horovod_volo.engine.checkpoint.files import CHECKPOINTS, clean_up
from horovod_volo.engine.checkpoint.resuming import checkpoint_to_resume, restore_state
from horovod_volo.engine.checkpoint.saving import LONGEST_WRITE_SECONDS
from horovod_volo.engine.context import TrainContext, build_context, run_folder
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.loop import fit
from horovod_volo.engine.model_cost import count_cost
from horovod_volo.engine.profiling import StepProfiler
from horovod_volo.engine.run_lock import RunLock
from horovod_volo.engine.run_texts import describe_run
from horovod_volo.engine.state import build_state
from horovod_volo.engine.task import Task
from horovod_volo.engine.task_names import find_task
from horovod_volo.kernels.choice import choose_kernels
from horovod_volo.models.compiled import check_compiler
from horovod_volo.models.precision import precision_warnings
from horovod_volo.monitor.further_loggers import check_packages
from horovod_volo.monitor.hardware import peak_flops
from horovod_volo.monitor.logger import Logger, NullLogger
from horovod_volo.monitor.metrics_file import METRICS, progress_so_far
from horovod_volo.monitor.run_logger import RunLogger
from horovod_volo.monitor.step_ranges import parse_steps
from horovod_volo.monitor.stragglers import StragglerFinder
from horovod_volo.monitor.training_clock import TrainingClock
from horovod_volo.monitor.training_progress import RunLength
from horovod_volo.plugins import check_names, load_plugins

_LOCK_SECONDS = 120.0  # the lock of another host is watched for a while


def run(
    config: Config,
    world: World,
    stop: StopRequest,
    watchdog: Watchdog,
    elastic: ElasticRun | None = None,
    callbacks: Sequence[Callback] = (),
    task: Task | None = None,
) -> bool:
    """Train; return False if a stop was requested before the last step. Collective: every rank calls this.

    `task` takes the place of the one that the settings name.
    """
    hosts = _watch_ranks(config, world, watchdog)
    begin_stage = watchdog.heartbeat.begin
    context, warnings = setup(config, world, stop, elastic, task)
    profiled = [StepProfiler(parse_steps(config.run.profile))] if config.run.profile else []
    try:
        begin_stage("starting callbacks and loggers")
        context.stragglers = StragglerFinder(hosts) if world.is_rank_zero and world.size > 1 else None
        of_plugins = world.run_on_all_ranks(partial(build_plugin_callbacks, config.run.plugin))
        context.callbacks = Callbacks([*profiled, *callbacks, *of_plugins], stop)
        log_start(context, hosts, warnings, elastic)
        context.callbacks.started(context)
        context.callbacks.raise_on_all_ranks(context)
        if elastic is not None:
            context.callbacks.failed = elastic.failed  # raised when this state is saved
            context.hosts_changed = lambda: elastic.job.hosts_changed
            elastic.forget()  # not before: a rank may be lost while the run is set up
        before = world.run_on_rank_zero(lambda: progress_so_far(context.folder / METRICS))
        context.skipped.total, context.clock = before.skipped_steps, TrainingClock(before.hours)
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
        if elastic is not None:
            elastic.keep(context)
        raise
    finally:
        begin_stage("closing its files", LONGEST_WRITE_SECONDS)
        for profiler in profiled:
            profiler.close()
        context.close()


def _watch_ranks(config: Config, world: World, watchdog: Watchdog) -> list[str]:
    """Let the watchdog end the run if a stage or a step does not; return the ranks' hosts. Collective."""
    world.collectives.heartbeat = watchdog.heartbeat
    hosts = world.hosts()
    name = world.broadcast_object(f"{hosts[0]}-{os.getpid()}-{uuid4().hex[:8]}")  # elastic ranks: each time
    watchdog.watch_ranks(world.rank, hosts, run_folder(config) / "hang" / name)
    return hosts


def setup(
    config: Config,
    world: World,
    stop: StopRequest,
    elastic: ElasticRun | None = None,
    task: Task | None = None,
) -> tuple[TrainContext, list[str]]:
    """Check the settings and build the run; return it with warnings. Collective: every rank calls this."""
    begin_stage = world.collectives.heartbeat.begin
    begin_stage("importing plugins")
    newest = elastic.find_newest(world) if elastic is not None else None
    if elastic is not None and elastic.resumes:
        config = replace(config, run=replace(config.run, resume="auto"))
    resources = rank_resources(world)
    world.run_on_all_ranks(partial(load_plugins, config.run.plugin))
    task = task or world.run_on_all_ranks(partial(_task_of, config))
    as_given = config = world.run_on_all_ranks(partial(task.fit_to_model, config))
    config = world.run_on_all_ranks(partial(resolve, config, world.size))
    world.run_on_all_ranks(partial(_check, config, task))
    begin_stage("listing the data")
    data = task.read(config, world)
    if config.is_open:
        chosen = task.choose(as_given, len(data.train), world.size, resources.device)
        config = resolve(world.broadcast_object(chosen), world.size)  # GPUs of ranks may differ
    derived = world.run_on_all_ranks(partial(derive, config, ranks=world.size, images=len(data.train)))
    begin_stage("looking for a checkpoint", LONGEST_WRITE_SECONDS)  # it is read as slowly as written
    checkpoint = None if newest else checkpoint_to_resume(config, world, task, data.train)
    finetune = "" if checkpoint or newest else config.model.finetune
    begin_stage("building the network", LONGEST_WRITE_SECONDS if finetune else 0.0)
    build = partial(build_state, config, world, task, num_classes=len(data.train.classes))
    state, state_warnings = world.run_on_all_ranks(partial(build, device=resources.device, finetune=finetune))
    begin_stage("checking kernels")
    state_warnings += choose_kernels(config, state.model, len(data.train.classes), resources.device, world)
    begin_stage("loading the state and copying it to all ranks", LONGEST_WRITE_SECONDS)
    if newest and elastic is not None:
        elastic.take_over(state, world)
    else:
        state_warnings += restore_state(state, checkpoint, world)
    begin_stage("opening the run folder", _LOCK_SECONDS)
    opened = partial(_open_run_folder, config, world, state.step, derived, elastic)
    logger, lock = world.run_on_all_ranks(opened)
    begin_stage("starting to read data")
    with ExitStack() as after_error:  # a notebook may train into the folder when the mistake is corrected
        if lock is not None:
            after_error.callback(lock.close)
        after_error.callback(logger.close)
        context = build_context(config, world, task, data, resources, state, logger, stop)
        after_error.pop_all()
    if lock is not None:
        context.lock, context.ledger.may_write = lock, lock.check
    own = (context.folder / CHECKPOINTS).resolve()  # which other ranks may see under another name
    if world.broadcast_object(checkpoint is not None and checkpoint.resolve().parent == own):
        context.checkpoints.step = state.step  # it need not be saved again
    return context, [*_warnings(context), *state_warnings]


def _warnings(context: TrainContext) -> list[str]:
    config, derived, device = context.config, context.derived, context.resources.device
    return [
        *config_warnings(
            config, RunFacts(context.world.size, device.type, context.state.step, derived.total_steps)
        ),
        *context.task.warnings(config, context.data),
        *batch_warnings(config, derived, len(context.data.train)),
        *precision_warnings(config.model.precision, device),
    ]


def _task_of(config: Config) -> Task:
    if not config.data.data_dir:
        raise UserError("The data folder is missing: python -m horovod_volo.train DATA_DIR ...")
    return find_task(config.model.task)


def _check(config: Config, task: Task) -> None:
    for flag, file in (
        ("autotune", config.launch.horovod_autotune),
        ("timeline", config.launch.horovod_timeline),
    ):
        if file and not Path(file).parent.is_dir():
            raise UserError(
                f"--horovod-{flag} {file}: the folder {Path(file).parent} does not exist. Create it first."
            )
    task.check(config)
    check_names(config)
    if config.run.profile:
        parse_steps(config.run.profile)
    check_packages(loggers(config.logging))
    if config.model.compile:
        check_compiler()


def _open_run_folder(
    config: Config, world: World, first_step: int, derived: Derived, elastic: ElasticRun | None
) -> tuple[Logger, RunLock | None]:
    if not world.is_rank_zero:
        return NullLogger(), None
    folder = run_folder(config)
    try:
        # Launchers prefix lines with the rank, which would break a progress line that is rewritten in place.
        live = world.launcher == "none"
        lock = RunLock(folder, elastic.job.name if elastic is not None else "")
        clean_up(folder / CHECKPOINTS)
        length = RunLength(first_step, derived.total_steps, derived.steps_per_epoch, config.run.eval_every)
        logger = RunLogger(folder, length, live=live, settings=config.logging)
        logger.may_write = lock.check
        return logger, lock
    except OSError as error:
        raise UserError(
            f"The run folder {folder} cannot be written: {error.strerror}. Give another --output."
        ) from None


def log_start(
    context: TrainContext, hosts: list[str], warnings: list[str], elastic: ElasticRun | None = None
) -> None:
    """Log the banner, write `resolved.toml` and `environment.json`. Collective: every rank calls this."""
    bindings = context.world.allgather_object(str(context.resources))
    warnings_of_ranks = context.world.allgather_object(context.world.binding.warnings)
    binding_warnings = dict.fromkeys(text for texts in warnings_of_ranks for text in texts)  # each once
    if elastic is not None and elastic.formed:
        context.logger.log(elastic.describe(context.state.step, hosts))
    else:
        context.logger.log(*format_banner(context, hosts, [*binding_warnings, *warnings]))
    _count_operations(context)
    context.logger.describe(context.state.step, partial(describe_run, context, hosts, bindings))
    context.ledger.begin(context.state.step, hosts, elastic.unwritten() if elastic else ())
    context.logger.write_file("resolved.toml", dump(context.config))
    environment = collect_environment() | {"hosts": hosts, "bindings": bindings}
    context.logger.write_file("environment.json", json.dumps(environment, indent=2))


def _count_operations(context: TrainContext) -> None:
    """Count what the network costs, and note the peak of the devices. Collective: every rank calls this."""
    world, device, precision = context.world, context.resources.device, context.config.model.precision
    classes = len(context.data.train.classes)
    context.cost = world.run_on_rank_zero(partial(count_cost, context.config, context.task, classes))
    if context.cost.problem:
        context.logger.log(f"the operations of the network are not counted: {context.cost.problem}")
    if device.type != "cuda":
        return
    gpu = torch.cuda.get_device_name(device)
    peaks = dict(world.allgather_object((f"{world.rank} {gpu}", peak_flops(gpu, precision))))
    if all(peaks.values()):
        context.peak_flops = sum(peaks.values())
    else:
        gpus = " and ".join(sorted({name.partition(" ")[2] for name, peak in peaks.items() if not peak}))
        context.logger.log(f"the peak of {gpus} in {precision} is not known: MFU is not logged")


def end_message(context: TrainContext, finished: bool) -> str:
    """Return the last line of the log; the scripts in jobs/ look for its first words."""
    step, total = context.state.step, context.derived.total_steps
    if finished:
        patience = context.config.run.early_stop
        none_better = f"{patience} evaluations in a row were no better than the best (--early-stop)"
        why = f" of {total}, because {none_better}"
        best = context.folder / CHECKPOINTS / "best"
        return f"done: {step} steps{why if step < total else ''}; best weights in {best}"
    why = ", because of --stop-at-step" if step == context.config.run.stop_at_step else ""
    return f"stopped at step {step} and saved{why}; resume with --resume auto"
