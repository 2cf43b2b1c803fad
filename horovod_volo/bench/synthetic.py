"""Work without images: random batches, random label maps, and a run of the real engine around them.

The figures must not depend on a disk, so nothing here reads one.
"""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import torch

from horovod_volo.cluster.world import World
from horovod_volo.config.schema import Config
from horovod_volo.data.catalog import Catalog
from horovod_volo.data.stream import Batch
from horovod_volo.engine.job import Images, Job, build_job, share_host
from horovod_volo.engine.state import build_state
from horovod_volo.monitor.tracker import Silent
from horovod_volo.objective.loss import Labels

MAP_SIDE, TOP = 18, 5  # of the published label maps


def random_labels(batch: int, num_classes: int, device: torch.device, seed: int) -> Labels:
    """Draw classes, label maps with distinct classes in each cell, and crops inside the image."""
    random = torch.Generator().manual_seed(seed)
    cells = (batch, TOP, MAP_SIDE, MAP_SIDE)
    scores = torch.rand(cells, generator=random).mul_(12).sort(dim=1, descending=True).values
    # Steps of at most a fifth of the classes, five in all, never come round to where they began.
    steps = torch.randint(1, num_classes // TOP + 1, cells, generator=random)
    extents = torch.rand(batch, 2, generator=random) * 0.8 + 0.2
    corners = torch.rand(batch, 2, generator=random) * (1 - extents)
    return Labels(
        classes=torch.randint(num_classes, (batch,), generator=random).to(device),
        scores=scores.half().to(device),
        ids=(steps.cumsum(dim=1) % num_classes).int().to(device),
        boxes=torch.cat([corners, extents], dim=1).to(device),
    )


def random_batch(config: Config, num_classes: int, device: torch.device, seed: int) -> Batch:
    """Draw one pass's batch."""
    batch, side = config.data.batch_size, config.model.img_size
    labels = random_labels(batch, num_classes, device, seed)
    images = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed))
    return Batch(
        images=images.to(device),
        classes=labels.classes,
        indices=np.arange(batch),
        scores=labels.scores,
        ids=labels.ids,
        boxes=labels.boxes,
    )


def synthetic_job(config: Config, world: World, num_classes: int) -> Job:
    """Build a run whose streams are never asked for a batch. Collective: every rank calls this."""
    share = share_host(world)
    state, _ = build_state(config, num_classes=num_classes, device=share.device, finetune="")
    world.broadcast_(state.every_tensor())
    global_batch = world.size * config.data.batch_size * config.update.accumulation
    catalog = Catalog(
        root=Path("nowhere"),
        classes=tuple(map(str, range(num_classes))),
        paths=("0/none.jpg",) * global_batch,
        targets=np.zeros(global_batch, dtype=np.int64),
    )
    job = build_job(config, world, Images(catalog, catalog, label_maps=None), share, state, Silent())
    # A run saves itself when it is told to end; a benchmark has nothing to save and just ends.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return job
