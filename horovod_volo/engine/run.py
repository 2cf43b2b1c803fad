"""One run from its settings to its end, in the order in which things can go wrong.

What can be checked is checked before anything is written.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from horovod_volo.cluster.share import share_of_host
from horovod_volo.cluster.world import World
from horovod_volo.config.derived import derive, resolve
from horovod_volo.config.errors import UserError
from horovod_volo.config.recipe import dump
from horovod_volo.config.rules import notes, uses_tokens
from horovod_volo.config.schema import Config
from horovod_volo.data.labels.source import geometry_remark
from horovod_volo.engine.banner import banner, batch_notes
from horovod_volo.engine.compiled import check_compiler, compile_blocks
from horovod_volo.engine.environment import environment_facts
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.job import Job, build_job, read_images, run_folder
from horovod_volo.engine.loop import fit
from horovod_volo.engine.precision import remarks_on
from horovod_volo.engine.resuming import checkpoint_to_resume, restore
from horovod_volo.engine.state import build_state
from horovod_volo.models.build import check_model
from horovod_volo.monitor.tracker import Silent, Tracker, Tracking


def run(config: Config, world: World, stop: StopRequest) -> bool:
    """Train; return whether it came to its end, or was asked to stop and is saved. Collective."""
    job, remarks = prepare(config, world, stop)
    try:
        announce(job, remarks)
        finished = fit(job)
        job.tracker.say(farewell(job, finished))
        return finished
    finally:
        job.close()


def prepare(config: Config, world: World, stop: StopRequest) -> tuple[Job, list[str]]:
    """Check and build everything; return the run and remarks about it. Collective: every rank calls this."""
    share = share_of_host(world)
    config = world.together(partial(resolve, config, world.size))
    world.together(partial(_check_files, config))
    world.together(partial(_check_model, config))
    images = read_images(config, world)
    derived = world.together(partial(derive, config, ranks=world.size, images=len(images.train)))
    checkpoint = checkpoint_to_resume(config, world, images.train)
    state, remarks = world.together(
        lambda: build_state(
            config,
            world,
            num_classes=len(images.train.classes),
            device=share.device,
            finetune="" if checkpoint else config.model.finetune,
        )
    )
    if config.model.compile:
        world.together(partial(compile_blocks, state.model))
    remarks = [*remarks, *restore(state, checkpoint, world)]
    tracker = world.together(partial(_tracker, config, world, state.step, derived.total_steps))
    job = build_job(config, world, images, share, state, tracker, stop)
    if images.label_maps is not None:
        remarks = geometry_remark(config.objective.token_label_data, images.label_maps) + remarks
    found = notes(config) + batch_notes(config, derived, len(images.train))
    return job, found + remarks_on(config.exchange.precision, share.device) + remarks


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
    check_model(config.model.model, img_size=config.model.img_size, tokens=uses_tokens(config))
    if config.model.compile:
        check_compiler()


def _tracker(config: Config, world: World, first_step: int, total_steps: int) -> Tracking:
    if not world.is_main:
        return Silent()
    folder = run_folder(config)
    try:
        # A launcher puts its own marks before each line: one that moves in place would be torn by them.
        live = world.launcher == "none"
        return Tracker(folder, first_step=first_step, total_steps=total_steps, live=live)
    except OSError as error:
        raise UserError(
            f"The run folder {folder} cannot be written: {error.strerror}. Give another --output."
        ) from None


def announce(job: Job, remarks: list[str]) -> None:
    """Say what runs and keep with what it was made. Collective: every rank calls this."""
    hosts, bindings = job.world.hosts(), job.world.gather(str(job.share))
    of_ranks = job.world.gather(job.world.bound.remarks)
    bound = dict.fromkeys(remark for of_rank in of_ranks for remark in of_rank)  # each once
    job.tracker.say(banner(job, hosts, [*bound, *remarks]))
    job.tracker.write_file("resolved.toml", dump(job.config))
    facts = environment_facts() | {"hosts": hosts, "bindings": bindings}
    job.tracker.write_file("environment.json", json.dumps(facts, indent=2))


def farewell(job: Job, finished: bool) -> str:
    """Word the end of a run."""
    if finished:
        return f"done: {job.state.step} steps; best weights in {job.folder / 'checkpoints' / 'best'}"
    return f"stopped at step {job.state.step} and saved; --resume auto goes on from here"
