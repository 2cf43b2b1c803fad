"""The published token-label formulas, dense and slow: the reference for the tests of the objective.

Everything is float64 and follows the definitions literally: a (classes, height, width) map for each image,
RoIAlign by loops, a softmax over all classes, smoothing and mixing.
"""

from math import ceil

import torch
from torch import Tensor

from horovod_volo.objective.soft_target import SoftTarget


def dense(target: SoftTarget, num_classes: int) -> Tensor:
    everywhere = target.uniform.double().unsqueeze(1).repeat(1, num_classes)
    return everywhere.scatter_add(1, target.ids, target.weights.double())


def bilinear(cells: Tensor, y: float, x: float, *, nearest: tuple[bool, bool]) -> Tensor:
    """Interpolate cells (classes, height, width) at a point: 0 outside [-1, size]; or the `nearest` cell."""
    height, width = cells.shape[1:]
    if not ((nearest[0] or -1 <= y <= height) and (nearest[1] or -1 <= x <= width)):
        return torch.zeros(cells.shape[0], dtype=cells.dtype)
    y, x = min(max(y, 0.0), height - 1.0), min(max(x, 0.0), width - 1.0)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    down, along = y - top, x - left
    upper = cells[:, top, left] * (1 - along) + cells[:, top, right] * along
    lower = cells[:, bottom, left] * (1 - along) + cells[:, bottom, right] * along
    return upper * (1 - down) + lower * down


def roi_align(cells: Tensor, corners: list[float], side: int, *, nearest: tuple[bool, bool]) -> Tensor:
    """Average an adaptive number of samples in each of side x side bins (aligned=False, spatial_scale=1)."""
    x1, y1, x2, y2 = corners
    bin_width, bin_height = max(x2 - x1, 1.0) / side, max(y2 - y1, 1.0) / side
    across, down = ceil(bin_width), ceil(bin_height)
    pooled = torch.zeros(cells.shape[0], side, side, dtype=cells.dtype)
    for row in range(side):
        for column in range(side):
            for sample_row in range(down):
                for sample_column in range(across):
                    y = y1 + row * bin_height + (sample_row + 0.5) * bin_height / down
                    x = x1 + column * bin_width + (sample_column + 0.5) * bin_width / across
                    pooled[:, row, column] += bilinear(cells, y, x, nearest=nearest)
    return pooled / (down * across)


def image_target(
    scores: Tensor, ids: Tensor, box: Tensor, side: int, num_classes: int, geometry: str
) -> Tensor:
    cells = torch.zeros(num_classes, *scores.shape[1:], dtype=torch.float64)
    cells = cells.scatter(0, ids.long(), scores.double())  # of the k best logits
    height, width = cells.shape[1:]
    top, left, tall, wide = box.double().tolist()
    bottom, right = top + tall, left + wide
    edges = ((left, width), (top, height), (right, width), (bottom, height))
    if geometry == "reference":  # top and left are read as x and y, all multiplied by the width
        edges = ((top, width), (left, width), (bottom, width), (right, width))
    corners = [edge * size - 0.5 for edge, size in edges]
    # Not in the published code, whose boxes are inside their images: beyond a map the nearest cell is used.
    nearest = top < 0 or bottom > 1, left < 0 or right > 1
    return roi_align(cells, corners, side, nearest=nearest).flatten(1).T.softmax(dim=1)


def batch_target(
    scores: Tensor, ids: Tensor, boxes: Tensor, side: int, num_classes: int, geometry: str
) -> Tensor:
    images = zip(scores, ids, boxes, strict=True)
    return torch.stack([image_target(*image, side, num_classes, geometry) for image in images])


def smooth(target: Tensor, smoothing: float) -> Tensor:
    """Apply label smoothing with the published on and off values."""
    off = smoothing / target.shape[-1]
    return target * (1 - smoothing + off) + off


def one_hot(classes: Tensor, num_classes: int) -> Tensor:
    return torch.nn.functional.one_hot(classes, num_classes).double()


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean over rows of -sum t log softmax(x)."""
    return -(target * logits.log_softmax(dim=-1)).sum(dim=-1).mean()


def random_maps(
    batch: int, k: int, height: int, width: int, num_classes: int, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw scores, distinct ids for each cell, and boxes inside the image."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(batch, k, height, width, generator=generator) * 4 + 2
    ids = torch.rand(batch, num_classes, height, width, generator=generator).argsort(dim=1)[:, :k]
    extents = torch.rand(batch, 2, generator=generator) * 0.9 + 0.08
    corners = torch.rand(batch, 2, generator=generator) * (1 - extents)
    return scores, ids, torch.cat([corners, extents], dim=1)
