"""Label maps and boxes as in the published training, in its form and in ours."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from horovod_volo.objective.loss import Labels
from horovod_volo.objective.mixtoken import Box
from tests.published.checkouts import Published

CLASSES, SIDE = 1000, 14
_K, _MAP_SIDE = 5, 18

# Neither square nor in the middle, so that rows taken for columns would show.
BOX = Box(top=3, left=5, height=7, width=4, grid=SIDE)


def labels_of(batch: int, seed: int) -> Labels:
    """Draw label maps with their half-precision logits, crops, and classes."""
    random = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(batch, _K, _MAP_SIDE, _MAP_SIDE, generator=random) + 6
    scores = scores.sort(dim=1, descending=True).values.half().float()
    # Neighbours are often of one class: ids from few of the classes, other ones for each image.
    few = torch.rand(batch, CLASSES, generator=random).argsort(dim=1)[:, : 2 * _K]  # (batch, 10)
    order = torch.rand(batch, 2 * _K, _MAP_SIDE, _MAP_SIDE, generator=random).argsort(dim=1)[:, :_K]
    ids = few.gather(1, order.flatten(1)).view_as(order)
    extents = 0.1 + 0.9 * torch.rand(batch, 2, generator=random)
    corners = (1 - extents) * torch.rand(batch, 2, generator=random)
    classes = torch.randint(CLASSES, (batch,), generator=random)
    return Labels(classes, scores, ids, torch.cat([corners, extents], dim=1))


def published_form(labels: Labels) -> Tensor:
    """Write a batch's labels as the published loader hands them over, (batch, 3, k, height, width)."""
    assert labels.scores is not None
    assert labels.ids is not None
    assert labels.boxes is not None
    maps = torch.stack([labels.scores, labels.ids.float(), torch.zeros_like(labels.scores)], dim=1)
    maps[:, 2, 0, 0, :4] = labels.boxes
    maps[:, 2, 0, 0, 5] = labels.classes.float()
    return maps


@cache
def published_target(published: Published, batch: int, seed: int, side: int = SIDE) -> Tensor:
    """Return the published dense target of the labels, (batch, classes, 2 + cells), by the published code."""
    maps = published_form(labels_of(batch, seed))
    target: Tensor = published.targets.mixup_target(
        maps, CLASSES, smoothing=0.1, device="cpu", label_size=side
    )
    return target
