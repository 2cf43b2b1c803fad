"""Dense label maps, cut to the image's crop, as soft targets.

A map holds a teacher's k best classes and logits for each cell of the whole image. The published
target averages the crop's logits with RoIAlign, every class outside a cell's k best counting as
logit 0, and takes the softmax over all classes. As almost all classes stay at 0, that softmax is
"uniform plus a few classes".

Invariant: the cost depends on k and the window, never on the number of classes. The k ids of one
map cell are distinct, as a top-k's are.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from horovod_volo.objective.soft_target import SoftTarget
from horovod_volo.objective.windows import Windows, axis_windows

Geometry = Literal["corrected", "reference"]


def map_target(
    scores: Tensor, ids: Tensor, boxes: Tensor, *, side: int, num_classes: int, geometry: Geometry
) -> SoftTarget:
    """Return the targets of a side x side grid over each crop, batch x side x side rows, row-major.

    `scores` (logits) and `ids` are (batch, k, height, width), already flipped like the image;
    `boxes` (batch, 4) are top, left, height, width as fractions of that flipped image.
    A row's entries have ascending ids, each once, and then weightless ones with id 0.
    """
    rows, columns = _windows(boxes, scores.shape[2], scores.shape[3], side, geometry)
    image = torch.arange(scores.shape[0], device=scores.device)[:, None, None, None, None]
    row = rows.cells[:, :, None, :, None]  # (batch, side, 1, length, 1)
    column = columns.cells[:, None, :, None, :]  # (batch, 1, side, 1, length)
    near_scores = scores.permute(0, 2, 3, 1)[image, row, column]  # (batch, side, side, length, length, k)
    near_ids = ids.permute(0, 2, 3, 1)[image, row, column]  # same
    weights = rows.weights[:, :, None, :, None] * columns.weights[:, None, :, None, :]
    logits = near_scores.float() * weights.unsqueeze(-1)

    targets = scores.shape[0] * side * side
    merged = _merged(near_ids.reshape(targets, -1).long(), logits.reshape(targets, -1))
    return _softmax(*merged, num_classes)


def most_probable(target: SoftTarget) -> Tensor:
    """Return each row's most probable class of a target made by `map_target`, (rows,); of equals, the first.

    Smoothing the target first changes nothing.
    """
    best_weight, best_entry = target.weights.max(dim=1)
    best_id = target.ids.gather(1, best_entry.unsqueeze(1)).squeeze(1)
    # Without a positive entry, all classes but those of negative entries share the first place.
    # Ids ascend, so as long as the negative ones run 0, 1, 2, ... each equals its rank among them.
    negative = target.weights < 0
    rank = negative.cumsum(dim=1) - 1
    first_not_negative = (negative & (target.ids == rank)).sum(dim=1)
    return torch.where(best_weight > 0, best_id, first_not_negative)


def _windows(
    boxes: Tensor, height: int, width: int, side: int, geometry: Geometry
) -> tuple[Windows, Windows]:
    top, left, tall, wide = boxes.unbind(dim=1)
    if geometry == "corrected":
        return (
            axis_windows(top, tall, side=side, size=height, scale=height),
            axis_windows(left, wide, side=side, size=width, scale=width),
        )
    # The published code hands (top, left, bottom, right) to RoIAlign as (x1, y1, x2, y2), all of
    # them multiplied by the map's width.
    return (
        axis_windows(left, wide, side=side, size=height, scale=width),
        axis_windows(top, tall, side=side, size=width, scale=width),
    )


def _merged(ids: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the logits of equal ids in each row; return distinct ids, ascending, then 0; sums; their number."""
    ids, order = ids.sort(dim=1)
    changes = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (1, 0))  # (rows, entries)
    place = changes.cumsum(dim=1)  # each entry's id, counted among the distinct ones
    sums = torch.zeros_like(logits).scatter_add_(1, place, logits.gather(1, order))
    return torch.zeros_like(ids).scatter_(1, place, ids), sums, place[:, -1:] + 1


def _softmax(ids: Tensor, logits: Tensor, distinct: Tensor, num_classes: int) -> SoftTarget:
    """Take the softmax over all classes, of logits that are 0 except at each row's first `distinct` ids.

    With Z = (classes - distinct) + sum e^z: every class has 1 / Z, an entry (e^z - 1) / Z more.
    A row whose entries are all the classes has no others: its uniform part is 0.
    """
    used = torch.arange(ids.shape[1], device=ids.device) < distinct  # (rows, entries)
    logits = logits.masked_fill(~used, -torch.inf)
    absent = num_classes - distinct  # (rows, 1) classes whose logit is 0
    # All terms are divided by e^highest against overflow, and against a sum of nothing but underflow.
    highest = logits.amax(dim=1, keepdim=True)  # (rows, 1)
    highest = torch.where(absent > 0, highest.clamp(min=0.0), highest)
    other = torch.where(absent > 0, (-highest).exp(), 0.0)  # (rows, 1) an absent class's term
    terms = (logits - highest).exp()  # (rows, entries)
    total = absent * other + terms.sum(dim=1, keepdim=True)  # (rows, 1)
    extra = (terms - other).masked_fill(~used, 0.0)  # (rows, entries)
    return SoftTarget((other / total).squeeze(1), ids, extra / total)
