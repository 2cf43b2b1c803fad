"""Label maps and boxes like those of the published training, in its format and in ours."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from horovod_volo.core.batch import LabelMaps, Labels
from horovod_volo.objective.mixing import Box
from horovod_volo.objective.soft_target import SoftTarget
from tests.published.checkouts import PublishedCode

CLASSES, SIDE = 1000, 14
_K, _CELLS = 5, (18, 18)


def box_on(grid: int) -> Box:
    """Return a box that is neither square nor centred, so that swapped rows and columns change the result."""
    return Box(top=grid * 3 // 14, left=grid * 5 // 14, height=grid // 2, width=grid * 2 // 7, grid=grid)


BOX = box_on(SIDE)  # 7 x 4 cells at (3, 5)


def labels_of(batch: int, seed: int, cells: tuple[int, int] = _CELLS, num_classes: int = CLASSES) -> Labels:
    """Draw label maps with half-precision logits, crops, and classes."""
    random = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(batch, _K, *cells, generator=random) + 6
    scores = scores.sort(dim=1, descending=True).values.half().float()
    # Neighbouring cells often have the same class, so the ids of an image are from a few classes.
    few = torch.rand(batch, num_classes, generator=random).argsort(dim=1)[:, : 2 * _K]  # (batch, 10)
    order = torch.rand(batch, 2 * _K, *cells, generator=random).argsort(dim=1)[:, :_K]
    ids = few.gather(1, order.flatten(1)).view_as(order)
    extents = 0.1 + 0.9 * torch.rand(batch, 2, generator=random)
    corners = (1 - extents) * torch.rand(batch, 2, generator=random)
    classes = torch.randint(num_classes, (batch,), generator=random)
    return Labels(classes, LabelMaps(scores, ids, torch.cat([corners, extents], dim=1)))


def published_form(labels: Labels) -> Tensor:
    """Return the labels of a batch in the format of the published loader, (batch, 3, k, height, width)."""
    assert labels.maps is not None
    scores = labels.maps.scores
    maps = torch.stack([scores, labels.maps.ids.float(), torch.zeros_like(scores)], dim=1)
    maps[:, 2, 0, 0, :4] = labels.maps.boxes
    maps[:, 2, 0, 0, 5] = labels.classes.float()
    return maps


@cache
def published_target(
    published: PublishedCode, batch: int, seed: int, side: int = SIDE, cells: tuple[int, int] = _CELLS
) -> Tensor:
    """Return the published code's dense target of random labels, (batch, classes, 2 + tokens)."""
    return published_target_of(published, labels_of(batch, seed, cells), side)


def published_target_of(
    published: PublishedCode,
    labels: Labels,
    side: int,
    num_classes: int = CLASSES,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Return the published code's dense target of these labels, computed in this precision."""
    maps_of = published.targets.get_featuremaps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published.targets, "get_featuremaps", lambda *a, **k: maps_of(*a, **k).to(precision))
        target: Tensor = published.targets.mixup_target(
            published_form(labels), num_classes, smoothing=0.1, device="cpu", label_size=side
        )
    return target


def dense(target: SoftTarget, num_classes: int = CLASSES) -> Tensor:
    """Return a soft target in dense form, (rows, classes)."""
    rows = target.uniform.unsqueeze(1).repeat(1, num_classes)
    return rows.scatter_add(1, target.ids, target.weights)
