"""Everything one run needs, built once from its settings and the world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from horovod_volo.cluster.resources import RankResources
from horovod_volo.cluster.world import World
from horovod_volo.config.derived import Derived, derive
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.data.augmentation.rand_augment import parse
from horovod_volo.data.images.catalog import Catalog, check_same_classes
from horovod_volo.data.labels.geometry import WHOLE, MapGeometry
from horovod_volo.data.labels.source import LabelSource, open_labels
from horovod_volo.data.loader import EvalLoader, TrainLoader
from horovod_volo.data.pipeline import Colours
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.precision import autocast
from horovod_volo.engine.shared_catalog import folder_for_lists, shared_catalog
from horovod_volo.engine.state import TrainState
from horovod_volo.models.build import Forward, spec_of, tokens_per_side, training_forward
from horovod_volo.monitor.meters import LossMeter
from horovod_volo.monitor.run_logger import Logger
from horovod_volo.objective.image_mix import draw_image_mix
from horovod_volo.objective.loss import Loss, LossParts, build_loss
from horovod_volo.objective.mixtoken import NO_BOX, Mix, draw_box
from horovod_volo.optim.clip import Clip, build_clip
from horovod_volo.optim.schedule import lr_at


@dataclass(frozen=True)
class Images:
    """The images of a run, read and checked."""

    train: Catalog
    held_out: Catalog
    label_maps: LabelSource | None


@dataclass
class TrainContext:
    """One run on one rank."""

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
    window: LossMeter
    clip: Clip
    lr: Callable[[int], float]
    mix: Callable[[int, int], Mix]  # of a step and a pass
    autocast: torch.autocast
    stop: StopRequest
    logger: Logger
    told: set[str] = field(default_factory=set)  # damaged samples that were named

    @property
    def folder(self) -> Path:
        """Return the run folder."""
        return run_folder(self.config)

    def close(self) -> None:
        """End the data threads and close the files."""
        self.train_loader.close()
        self.eval_loader.close()
        self.images.train.close()
        self.images.held_out.close()
        if self.images.label_maps is not None:
            self.images.label_maps.close()
        self.logger.close()


def run_folder(config: Config) -> Path:
    """Return where a run's results go."""
    return Path(config.run.output) / config.run.name


def read_images(config: Config, world: World) -> Images:
    """Read what images there are; raise UserError where they cannot be trained on. Collective."""
    world.run_on_all_ranks(partial(check_images, config))
    folder = folder_for_lists(config.data.catalog_dir, config.run.output, world)
    train = shared_catalog(config.data.data_dir, "train", folder, world)
    held_out = shared_catalog(config.data.data_dir, "val", folder, world)
    label_maps = world.run_on_all_ranks(partial(_checked, config, train, held_out))
    return Images(train, held_out, label_maps)


def check_images(config: Config) -> None:
    """Raise UserError where the settings alone tell that no images can be read."""
    if not config.data.data_dir:
        raise UserError("Which images? Give the data folder: python -m horovod_volo.train DATA_DIR ...")
    if config.data.aa:
        parse(config.data.aa)
    _map_geometry(config)


def _map_geometry(config: Config) -> MapGeometry | None:
    """Return what a label map covers according to the settings; None: they leave it to the maps."""
    if config.objective.label_geometry == "reference":
        return WHOLE
    stated = config.objective.map_geometry
    return MapGeometry.parse(stated) if stated else None


def _checked(config: Config, train: Catalog, held_out: Catalog) -> LabelSource | None:
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
    """Put a run together around its state."""
    derived = derive(config, ranks=world.size, images=len(images.train))
    streams = _streams(config, world, images, resources)
    loss = build_loss(
        config.objective,
        len(images.train.classes),
        tokens_per_side(config.model.model, config.model.img_size),
    )
    return TrainContext(
        config=config,
        world=world,
        resources=resources,
        derived=derived,
        images=images,
        state=state,
        train_loader=streams[0],
        eval_loader=streams[1],
        forward=training_forward(state.model),
        loss=loss,
        window=LossMeter(LossParts._fields, resources.device, lambda: streams[0].waited_seconds),
        clip=_clip(config, state),
        lr=_schedule(config, derived),
        mix=_mixes(config, world),
        autocast=autocast(config.model.precision, resources.device),
        stop=stop,
        logger=logger,
    )


def _streams(
    config: Config, world: World, images: Images, resources: RankResources
) -> tuple[TrainLoader, EvalLoader]:
    threads = config.data.workers or resources.threads
    spec = spec_of(config.model.model)
    colours = Colours(spec.mean, spec.std)
    train = TrainLoader(
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
        colours=colours,
    )
    held_out = EvalLoader(
        images.held_out,
        config.data,
        image_size=config.model.img_size,
        crop_pct=config.data.crop_pct or spec.crop_pct,
        interpolation=spec.interpolation,
        rank=world.rank,
        size=world.size,
        device=resources.device,
        threads=threads,
        colours=colours,
    )
    return train, held_out


def _clip(config: Config, state: TrainState) -> Clip:
    return build_clip(
        config.update.clip_mode,
        config.update.clip_grad,
        state.reducer.local_parameters,
        flat_gradients=state.reducer.flat_gradients,
        heads=spec_of(config.model.model).heads,
        global_grad_norm=state.reducer.global_grad_norm,
    )


def _schedule(config: Config, derived: Derived) -> Callable[[int], float]:
    return partial(
        lr_at,
        peak=derived.peak_lr,
        start=derived.warmup_lr,
        floor=derived.min_lr,
        warmup=derived.warmup_steps,
        cosine=derived.cosine_steps,
        prefix=derived.prefix_steps,
        stride=derived.steps_per_epoch if config.update.lr_changes == "epoch" else 1,
    )


def _mixes(config: Config, world: World) -> Callable[[int, int], Mix]:
    seed, objective = config.run.seed, config.objective
    if objective.mix_token:
        side = tokens_per_side(config.model.model, config.model.img_size)
        return lambda step, number: draw_box(seed, step, world.rank, number, side)
    if objective.mixup or objective.cutmix:
        pixels = config.model.img_size
        return lambda step, number: draw_image_mix(objective, seed, step, world.rank, number, pixels)
    return lambda step, number: NO_BOX  # noqa: ARG005
