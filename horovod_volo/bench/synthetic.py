"""Random batches and label maps, and runs of the real engine on them, so that no figure depends on a disk."""

import itertools
import math
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from horovod_volo.cluster.world import RankResources, World, rank_resources
from horovod_volo.config.derived import derive
from horovod_volo.config.recipe import assemble
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import check
from horovod_volo.core.batch import LabelMaps, Labels, TrainBatch
from horovod_volo.core.operators import choose_kernels
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.images.catalog_file import CatalogWriter, OpenFile
from horovod_volo.engine.classification import Classification, ClassificationLearner
from horovod_volo.engine.classification_data import Images
from horovod_volo.engine.context import Plan, TrainContext
from horovod_volo.engine.interrupts import StopRequest
from horovod_volo.engine.state import build_state
from horovod_volo.engine.step import train_step
from horovod_volo.models.build import spec_of
from horovod_volo.monitor.logger import Logger

MAP_SIDE, TOP = 18, 5  # of the published label maps: cells per side, and classes in each cell
CLASSES = 1000  # of a run, unless its settings say otherwise


def bench_config(**settings: Any) -> Config:
    """Return the settings of a run on a random batch; raise UserError where they are inconsistent.

    It learns token labels from random maps if the model has tokens, unless `token_label` is False.
    """
    tokens = settings.setdefault("token_label", bool(spec_of(settings["model"]).stride))
    of_tokens = {"token_label_data": "random" if tokens else "", "mix_token": tokens}
    config = assemble({"num_classes": CLASSES} | of_tokens | settings, fallback_name="bench")
    check(config)
    return config


def random_labels(batch: int, num_classes: int, device: torch.device, seed: int) -> Labels:
    """Draw classes, label maps with distinct classes in each cell, and crops inside the image.

    Neighbouring cells have different classes, which is rare in real maps: no entries can be merged.
    """
    random = torch.Generator().manual_seed(seed)
    cells = (batch, TOP, MAP_SIDE, MAP_SIDE)
    scores = torch.rand(cells, generator=random).mul_(12).sort(dim=1, descending=True).values
    # Five increments of at most a fifth of the classes each never wrap around to the first class.
    steps = torch.randint(1, num_classes // TOP + 1, cells, generator=random)
    extents = torch.rand(batch, 2, generator=random) * 0.8 + 0.2
    corners = torch.rand(batch, 2, generator=random) * (1 - extents)
    maps = LabelMaps(
        scores=scores.half(),
        ids=(steps.cumsum(dim=1) % num_classes).int(),
        boxes=torch.cat([corners, extents], dim=1),
    )
    return Labels(torch.randint(num_classes, (batch,), generator=random), maps).to(device)


def random_batch(config: Config, device: torch.device, seed: int) -> TrainBatch:
    """Draw the images and labels of one micro-batch."""
    batch, side = config.data.batch_size, config.model.img_size
    images = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed))
    labels = random_labels(batch, config.model.num_classes, device, seed)
    return TrainBatch(images.to(device), labels, np.arange(batch), np.arange(batch))


def synthetic_context(config: Config, world: World, resources: RankResources | None = None) -> TrainContext:
    """Build a run whose data loaders are never read, by default on the rank's own device. Collective."""
    resources, num_classes = resources or rank_resources(world), config.model.num_classes
    task, device = Classification(), resources.device
    state, _ = build_state(config, world, task, num_classes=num_classes, device=device, finetune="")
    choose_kernels(config.model.kernels, device, config, state.model, num_classes, world)
    if world.size > 1:
        state.load_full_state_dict({}, {}, 0, world)
    global_batch = world.size * config.data.batch_size * config.update.accumulation
    catalog = catalog_without_files(global_batch, num_classes)
    images = Images(catalog, catalog, label_maps=None)
    plan = Plan(config, derive(config, ranks=world.size, images=global_batch), task, images, resources)
    return TrainContext(plan, world, state, Logger(), StopRequest())


def learner_of(context: TrainContext) -> ClassificationLearner:
    """Return the learner of a run, whose parts can be replaced."""
    assert isinstance(context.learner, ClassificationLearner)
    return context.learner


def catalog_without_files(images: int, num_classes: int) -> Catalog:
    """Build an in-memory catalog of images that do not exist."""
    memory = OpenFile(os.memfd_create("catalog"))
    writer = CatalogWriter(memory.descriptor)
    writer.add(0, [f"{number}.jpg" for number in range(images)])
    classes = [str(number) for number in range(num_classes)]
    writer.finish(classes, range(num_classes), shards=(), source="nowhere", state="")
    return Catalog(memory, path=None)


class SyntheticRun:
    """Steps of the engine on one random batch, from fresh weights. Collective: every rank takes them."""

    def __init__(self, config: Config, world: World | None = None) -> None:
        self.context = synthetic_context(config, world or World.single())
        self.device = self.context.resources.device
        self.batch = random_batch(config, self.device, seed=self.context.world.rank)

    def close(self) -> None:
        """Close the run's files and threads."""
        self.context.close()

    def step(self) -> None:
        train_step(self.context, itertools.repeat(self.batch))

    def losses(self, steps: int) -> Tensor:
        """Take steps and return the loss of each."""
        losses = []
        for _ in range(steps):
            self.context.progress.meter.reset()
            self.step()
            sums = self.context.progress.meter.sums()
            losses.append(sums["total"] if sums["finite"] else math.nan)
        return torch.tensor(losses)


def flat_weights(model: nn.Module) -> Tensor:
    """Return a copy of all weights in one tensor."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()
