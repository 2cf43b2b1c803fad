"""One training run: set it up, train to the end or to a stop request, and close what it has opened."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from uuid import uuid4

import torch

from horovod_volo.cluster.binding import Binding
from horovod_volo.cluster.collectives import HostsChangedError, RankLostError
from horovod_volo.cluster.watchdog import Watchdog
from horovod_volo.cluster.world import World
from horovod_volo.config.recipe import dump
from horovod_volo.config.schema import Config
from horovod_volo.core.environment import collect_environment
from horovod_volo.core.names import Registry
from horovod_volo.data.images import catalog_file
from horovod_volo.engine.banner import banner, describe_run, format_lines
from horovod_volo.engine.callbacks import PROFILERS, Callback, Callbacks, build_plugin_callbacks, parse_steps
from horovod_volo.engine.checkpoint.saving import LONGEST_WRITE_SECONDS
from horovod_volo.engine.context import TrainContext, run_folder
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.loop import fit
from horovod_volo.engine.model_cost import count_cost
from horovod_volo.engine.setup import FROM_DISK, Start, setup
from horovod_volo.monitor.logger import METRICS, last_values
from horovod_volo.monitor.meters import StragglerFinder, TrainingClock, peak_flops

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
    hosts = list(context.hosts)
    bindings = context.world.allgather_object(str(context.resources))
    warnings_of_ranks = context.world.allgather_object(context.world.binding.warnings)
    binding_warnings = dict.fromkeys(text for texts in warnings_of_ranks for text in texts)  # each once
    properties = banner(context, hosts)
    if shown:
        context.logger.log(*format_lines(properties, [*binding_warnings, *warnings]))
    _count_operations(context)
    context.logger.describe(context.state.step, partial(describe_run, context))
    context.logger.write_file("resolved.toml", dump(context.config))
    environment = collect_environment() | {"hosts": hosts, "bindings": bindings, "banner": properties}
    context.logger.write_file("environment.json", json.dumps(environment, indent=2))


def _count_operations(context: TrainContext) -> None:
    """Count what the network costs, and note the peak of the devices. Collective: every rank calls this."""
    world, device, precision = context.world, context.resources.device, context.config.model.precision
    classes = len(context.data.train.classes)
    cost = world.run_on_rank_zero(partial(count_cost, context.config, context.task, classes))
    context.forward_flops = cost.forward_flops
    if cost.problem:
        context.logger.log(f"the operations of the network are not counted: {cost.problem}")
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
    why = ", because of --stop-at-step" if step == context.config.run.stop_at_step else ""
    return f"stopped at step {step} and saved{why}; resume with --resume auto"
