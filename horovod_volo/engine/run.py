"""One run from its settings to its end, in the order in which things can go wrong.

What can be checked is checked before anything is written.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from horovod_volo.cluster.resources import rank_resources
from horovod_volo.cluster.world import World
from horovod_volo.config.derived import derive, resolve
from horovod_volo.config.recipe import dump
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import notes
from horovod_volo.core.errors import UserError
from horovod_volo.data.labels.source import geometry_remark
from horovod_volo.engine.banner import banner, batch_notes, token_size_warnings
from horovod_volo.engine.checkpoint.resuming import checkpoint_to_resume, restore
from horovod_volo.engine.compiled import check_compiler, compile_blocks
from horovod_volo.engine.context import TrainContext, build_context, read_images, run_folder
from horovod_volo.engine.environment import environment_facts
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.loop import fit
from horovod_volo.engine.precision import remarks_on
from horovod_volo.engine.state import build_state
from horovod_volo.monitor.run_logger import Logger, NullLogger, RunLogger
from horovod_volo.plugins import check_names, load_plugins


def run(config: Config, world: World, stop: StopRequest) -> bool:
    """Train; return whether it came to its end, or was asked to stop and is saved. Collective."""
    context, remarks = setup(config, world, stop)
    try:
        log_start(context, remarks)
        finished = fit(context)
        context.logger.log(end_message(context, finished))
        return finished
    finally:
        context.close()


def setup(config: Config, world: World, stop: StopRequest) -> tuple[TrainContext, list[str]]:
    """Check and build everything; return the run and remarks about it. Collective: every rank calls this."""
    resources = rank_resources(world)
    world.run_on_all_ranks(partial(load_plugins, config.run.plugin))
    config = world.run_on_all_ranks(partial(resolve, config, world.size))
    world.run_on_all_ranks(partial(_check_files, config))
    world.run_on_all_ranks(partial(_check_model, config))
    images = read_images(config, world)
    derived = world.run_on_all_ranks(partial(derive, config, ranks=world.size, images=len(images.train)))
    checkpoint = checkpoint_to_resume(config, world, images.train)
    state, remarks = world.run_on_all_ranks(
        lambda: build_state(
            config,
            world,
            num_classes=len(images.train.classes),
            device=resources.device,
            finetune="" if checkpoint else config.model.finetune,
        )
    )
    if config.model.compile:
        world.run_on_all_ranks(partial(compile_blocks, state.model))
    remarks = [*remarks, *restore(state, checkpoint, world)]
    logger = world.run_on_all_ranks(partial(_tracker, config, world, state.step, derived.total_steps))
    context = build_context(config, world, images, resources, state, logger, stop)
    if images.label_maps is not None:
        remarks = geometry_remark(config.objective.token_label_data, images.label_maps) + remarks
    found = notes(config) + token_size_warnings(config) + batch_notes(config, derived, len(images.train))
    return context, found + remarks_on(config.model.precision, resources.device) + remarks


def _check_files(config: Config) -> None:
    for flag, file in (
        ("autotune", config.launch.horovod_autotune),
        ("timeline", config.launch.horovod_timeline),
    ):
        if file and not Path(file).parent.is_dir():
            raise UserError(
                f"--horovod-{flag} {file}: there is no folder {Path(file).parent}. Make it first."
            )


def _check_model(config: Config) -> None:
    check_names(config)
    if config.model.compile:
        check_compiler()


def _tracker(config: Config, world: World, first_step: int, total_steps: int) -> Logger:
    if not world.is_rank_zero:
        return NullLogger()
    folder = run_folder(config)
    try:
        # A launcher puts its own marks before each line: one that moves in place would be torn by them.
        live = world.launcher == "none"
        return RunLogger(folder, first_step=first_step, total_steps=total_steps, live=live)
    except OSError as error:
        raise UserError(
            f"The run folder {folder} cannot be written: {error.strerror}. Give another --output."
        ) from None


def log_start(context: TrainContext, remarks: list[str]) -> None:
    """Say what runs and keep with what it was made. Collective: every rank calls this."""
    hosts, bindings = context.world.hosts(), context.world.allgather_object(str(context.resources))
    of_ranks = context.world.allgather_object(context.world.bound.remarks)
    bound = dict.fromkeys(remark for of_rank in of_ranks for remark in of_rank)  # each once
    context.logger.log(banner(context, hosts, [*bound, *remarks]))
    context.logger.write_file("resolved.toml", dump(context.config))
    facts = environment_facts() | {"hosts": hosts, "bindings": bindings}
    context.logger.write_file("environment.json", json.dumps(facts, indent=2))


def end_message(context: TrainContext, finished: bool) -> str:
    """Word the end of a run."""
    if finished:
        return f"done: {context.state.step} steps; best weights in {context.folder / 'checkpoints' / 'best'}"
    return f"stopped at step {context.state.step} and saved; --resume auto goes on from here"
