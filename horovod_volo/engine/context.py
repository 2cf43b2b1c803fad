"""Everything that a training run uses on one rank, built once from its settings and the world.

`read_images` is called first, because the model needs the number of classes; `build_context` takes the state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from horovod_volo.cluster.resources import RankResources
from horovod_volo.cluster.watchdog_process import Heartbeat
from horovod_volo.cluster.world import World
from horovod_volo.config.derived import Derived, derive
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.data.augmentation.rand_augment import parse
from horovod_volo.data.images.catalog import Catalog, check_same_classes
from horovod_volo.data.labels.geometry import WHOLE, MapGeometry
from horovod_volo.data.labels.source import LabelSource, open_labels
from horovod_volo.data.loader import EvalLoader, TrainLoader
from horovod_volo.data.pipeline import Normalization
from horovod_volo.engine.checkpoint.writer import CheckpointWriter
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.ledger import LEDGER, Ledger, LedgerStart
from horovod_volo.engine.run_lock import RunLock
from horovod_volo.engine.shared_catalog import catalog_folder, shared_catalog
from horovod_volo.engine.state import TrainState
from horovod_volo.models.build import Forward, spec_of, tokens_per_side, training_forward
from horovod_volo.models.precision import autocast
from horovod_volo.monitor.meters import LossMeter
from horovod_volo.monitor.run_logger import Logger
from horovod_volo.monitor.stragglers import StepTimer, StragglerFinder
from horovod_volo.objective.loss import Loss, LossParts, build_loss
from horovod_volo.objective.mixing import NO_BOX, Mix, draw_box, draw_image_mix
from horovod_volo.optim.clip import Clip, build_clip, gradient_norm
from horovod_volo.optim.schedule import SCHEDULES, lr_at


@dataclass(frozen=True)
class Images:
    """The lists of training and validation images, and the label maps of the training images."""

    train: Catalog
    held_out: Catalog
    label_maps: LabelSource | None


@dataclass
class TrainContext:
    """One training run on one rank: the loop, the step and the checkpoints use it."""

    config: Config
    world: World
    resources: RankResources
    derived: Derived
    images: Images
    state: TrainState
    train_loader: TrainLoader
    eval_loader: EvalLoader
    forward: Forward
    loss: Loss
    meter: LossMeter  # since the last log point
    timer: StepTimer  # likewise
    clip: Clip
    gradient_norm: Callable[[], Tensor]
    lr: Callable[[int], float]  # lr(step)
    mix: Callable[[int, int], Mix]  # mix(step, micro-batch)
    autocast: torch.autocast
    stop: StopRequest
    logger: Logger
    ledger: Ledger
    lock: RunLock | None = None  # of the run folder, on rank 0
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    checkpoints: CheckpointWriter = field(default_factory=CheckpointWriter)
    skipped_in_a_row: int = 0  # steps, because a loss is not finite
    returns: int = 0  # to a checkpoint, because of such steps
    logged_norm: Tensor | None = None  # of the gradients, at the step of a log point
    recent: dict[str, list[float]] = field(default_factory=dict)  # values of the last log points, by name
    returns_in_vain: int = 0  # of them, those after which no step had a finite loss
    repairs: int = 0  # returns to a checkpoint, because the state of ranks differed
    hosts_changed: Callable[[], bool] = lambda: False  # whether an elastic job has other hosts now
    stragglers: StragglerFinder | None = None  # on rank 0 of several
    logged_bad_samples: set[str] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return run_folder(self.config)

    def close(self) -> None:
        """Finish the checkpoint under way, stop the data threads and close all files."""
        self.checkpoints.close()
        self.train_loader.close()
        self.eval_loader.close()
        self.images.train.close()
        self.images.held_out.close()
        if self.images.label_maps is not None:
            self.images.label_maps.close()
        self.ledger.write()
        self.logger.close()
        if self.lock is not None:
            self.lock.close()


def run_folder(config: Config) -> Path:
    """Return the folder of a run's results."""
    return Path(config.run.output) / config.run.name


def read_images(config: Config, world: World) -> Images:
    """List the images and open the label maps; raise UserError if they do not fit. Collective."""
    world.run_on_all_ranks(partial(check_images, config))
    folder = catalog_folder(config.data.catalog_dir, config.run.output, world)
    train = shared_catalog(config.data.data_dir, "train", folder, world)
    held_out = shared_catalog(config.data.data_dir, "val", folder, world)
    label_maps = world.run_on_all_ranks(partial(_open_label_maps, config, train, held_out))
    return Images(train, held_out, label_maps)


def check_images(config: Config) -> None:
    """Raise UserError for settings of images and label maps that are wrong with any data."""
    if not config.data.data_dir:
        raise UserError("The data folder is missing: python -m horovod_volo.train DATA_DIR ...")
    if config.data.aa:
        parse(config.data.aa)
    _map_geometry(config)


def _map_geometry(config: Config) -> MapGeometry | None:
    """Return the part of their images that the settings say label maps cover; None: as recorded."""
    if config.objective.label_geometry == "reference":
        return WHOLE
    geometry = config.objective.map_geometry
    return MapGeometry.parse(geometry) if geometry else None


def _open_label_maps(config: Config, train: Catalog, held_out: Catalog) -> LabelSource | None:
    """Check the classes of the images against each other and the settings; open the label maps, if any."""
    check_same_classes(train, held_out)
    if config.model.num_classes not in (0, len(train.classes)):
        raise UserError(
            f"--num-classes is {config.model.num_classes}, but {train.source} has "
            f"{len(train.classes)} classes. Drop --num-classes."
        )
    if not config.objective.token_label_data:
        return None
    cache = train.path.parent if train.path else None
    return open_labels(config.objective.token_label_data, train, cache, _map_geometry(config))


def build_context(
    config: Config,
    world: World,
    images: Images,
    resources: RankResources,
    state: TrainState,
    logger: Logger,
    stop: StopRequest,
) -> TrainContext:
    """Build the loaders, the loss and the schedules of a run, given its state."""
    derived = derive(config, ranks=world.size, images=len(images.train))
    train_loader, eval_loader = build_loaders(config, world, images, resources)
    side = tokens_per_side(config.model.model, config.model.img_size)
    loss = build_loss(config.objective, len(images.train.classes), side)
    return TrainContext(
        config=config,
        world=world,
        resources=resources,
        derived=derived,
        images=images,
        state=state,
        train_loader=train_loader,
        eval_loader=eval_loader,
        forward=training_forward(state.model),
        loss=loss,
        meter=LossMeter(LossParts._fields, resources.device, lambda: train_loader.waited_seconds),
        timer=StepTimer(resources.device),
        clip=_build_clip(config, state),
        gradient_norm=partial(gradient_norm, state.reducer.local_gradients, state.reducer.global_grad_norm),
        lr=build_schedule(config, derived),
        mix=_build_mix(config, world),
        autocast=autocast(config.model.precision, resources.device),
        stop=stop,
        logger=logger,
        ledger=_build_ledger(config, world, images, derived),
    )


def _build_ledger(config: Config, world: World, images: Images, derived: Derived) -> Ledger:
    data = config.data
    start = LedgerStart(
        seed=config.run.seed,
        images=len(images.train),
        block_shuffle=data.block_shuffle,
        shuffle_window=data.shuffle_window,
        global_batch=derived.global_batch,
        steps_per_epoch=derived.steps_per_epoch,
        ranks=world.size,
    )
    return Ledger(run_folder(config) / LEDGER if world.is_rank_zero else None, start)


def build_loaders(
    config: Config, world: World, images: Images, resources: RankResources
) -> tuple[TrainLoader, EvalLoader]:
    """Build this rank's loaders; images are normalised, and resized for evaluation, as the model expects."""
    threads = config.data.workers or resources.threads
    spec = spec_of(config.model.model)
    normalization = Normalization(spec.mean, spec.std)
    train_loader = TrainLoader(
        images.train,
        images.label_maps,
        config.data,
        image_size=config.model.img_size,
        seed=config.run.seed,
        rank=world.rank,
        size=world.size,
        accumulation=config.update.accumulation,
        device=resources.device,
        threads=threads,
        normalization=normalization,
    )
    eval_loader = EvalLoader(
        images.held_out,
        config.data,
        image_size=config.model.img_size,
        crop_pct=config.data.crop_pct or spec.crop_pct,
        interpolation=spec.interpolation,
        rank=world.rank,
        size=world.size,
        device=resources.device,
        threads=threads,
        normalization=normalization,
    )
    return train_loader, eval_loader


def _build_clip(config: Config, state: TrainState) -> Clip:
    return build_clip(
        config.update.clip_mode,
        config.update.clip_grad,
        state.reducer.local_parameters,
        flat_gradients=state.reducer.local_gradients,
        heads=spec_of(config.model.model).heads,
        global_grad_norm=state.reducer.global_grad_norm,
    )


def build_schedule(config: Config, derived: Derived) -> Callable[[int], float]:
    """Return the learning rate as a function of the step."""
    return partial(
        lr_at,
        decay=SCHEDULES.find(config.update.sched),
        peak=derived.peak_lr,
        start=derived.warmup_lr,
        floor=derived.min_lr,
        warmup=derived.warmup_steps,
        decay_steps=derived.decay_steps,
        prefix=derived.prefix_steps,
        stride=derived.steps_per_epoch if config.update.lr_changes == "epoch" else 1,
    )


def _build_mix(config: Config, world: World) -> Callable[[int, int], Mix]:
    """Return MixToken, mixup/CutMix or no mixing as a function of the step and the micro-batch's number."""
    seed, objective = config.run.seed, config.objective
    if objective.mix_token:
        side = tokens_per_side(config.model.model, config.model.img_size)
        return lambda step, number: draw_box(seed, step, world.rank, number, side)
    if objective.mixup or objective.cutmix:
        pixels = config.model.img_size
        return lambda step, number: draw_image_mix(objective, seed, step, world.rank, number, pixels)
    return lambda step, number: NO_BOX  # noqa: ARG005
