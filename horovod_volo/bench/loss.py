"""The sparse token-label loss, its targets and gradients against the published form.

Our loss overwrites the token logits by their gradient, so every call gets new ones, as in training; making
them is not timed. `PublishedLoss` follows the published code step by step, with one dense target tensor; it
crops the maps by two matrix products where the published code calls RoIAlign.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Annotated

import torch
from torch import Tensor

from horovod_volo.bench.comparison import (
    TimedBlock,
    alternate,
    assert_agree,
    default_device,
    peak_extra_bytes,
    repeats_for,
    timed,
)
from horovod_volo.bench.results import Figure, Flag, Pairs, Result
from horovod_volo.bench.synthetic import TOP, random_labels
from horovod_volo.config.task_settings import Objective
from horovod_volo.core.batch import Labels
from horovod_volo.core.errors import UserError
from horovod_volo.objective.loss import build_loss
from horovod_volo.objective.mixing import Box

_SIDE = 14  # of the token grid of a 224 px image
_TOLERANCE = 1e-5  # of ours, against float64
# At 21,841 classes the dense formula in fp32 differs by 2e-4 from itself in float64: its softmax sums the
# classes one by one.
_PEER_TOLERANCE = 1e-3
_COMPARED = ("the loss", "the gradient of class logits", "the gradient of token logits")

LossFunction = Callable[[Tensor, Tensor, Labels, Box], Tensor]


def measure(
    *,
    classes: Annotated[Sequence[int], Flag("numbers of classes, each measured in turn")] = (1000, 21841),
    batch_sizes: Annotated[
        Sequence[int], Flag("images; sizes after the first only with the first number of classes")
    ] = (8,),
    pairs: Pairs = 7,
) -> Result:
    """Compare the losses for each number of classes, and in each batch size for the first of them."""
    if min(classes) < TOP:
        raise UserError(
            f"--classes takes {TOP} or more: a label map has {TOP} different classes in every cell."
        )
    sizes = [(number, batch_sizes[0]) for number in classes]
    sizes += [(classes[0], batch_size) for batch_size in batch_sizes[1:]]
    figures = [figure for size in sizes for figure in _compare(*size, pairs)]
    return Result("loss", "token-label loss: targets, loss and gradient, against the published form", figures)


def _compare(num_classes: int, batch_size: int, pairs: int) -> list[Figure]:
    settings = Objective(token_label=True, token_label_data="random")
    name, device = f"{num_classes:,} classes, batch {batch_size}", default_device()
    random = torch.Generator().manual_seed(1)
    class_logits, token_logits = (
        torch.randn(shape, generator=random).to(device).requires_grad_()
        for shape in ((batch_size, num_classes), (batch_size, _SIDE**2, num_classes))
    )
    labels, box = random_labels(batch_size, num_classes, device, 0), Box(0, 0, _SIDE // 2, _SIDE // 2, _SIDE)
    sparse = build_loss(settings, num_classes, _SIDE)
    published = PublishedLoss(settings, num_classes, _SIDE)

    def ours(class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Box) -> Tensor:
        return sparse(class_logits, token_logits, labels, box).total

    def run(loss: LossFunction, logits: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return the loss and the gradients of class logits and token logits."""
        total = loss(class_logits.to(dtype), logits.to(dtype), labels, box)
        return [total, *torch.autograd.grad(total, (class_logits, logits))]

    exact = PublishedLoss(settings, num_classes, _SIDE, torch.float64)
    expected = run(exact, token_logits, torch.float64)
    sides: tuple[tuple[str, LossFunction, float], ...] = (
        ("ours", ours, _TOLERANCE),
        ("published", published, _PEER_TOLERANCE),
    )
    for what, loss, tolerance in sides:
        for part, value, right in zip(_COMPARED, run(loss, token_logits.clone()), expected, strict=True):
            assert_agree(f"{part} of {what} at {name}, against float64", value, right, tolerance)
    del expected, value, right  # before memory is measured

    # As a network returns them, logits are the result of an operation and used nowhere else.
    def timed_block(loss: LossFunction) -> TimedBlock:
        def once() -> float:
            return timed(partial(run, loss, token_logits.clone()), 1, device)()

        repeats = repeats_for(once)
        return lambda: fmean(once() for _ in range(repeats))

    our_peak, peak = (
        peak_extra_bytes(partial(run, loss, token_logits.clone()), device) for _, loss, _ in sides
    )
    found = alternate(timed_block(ours), timed_block(published), pairs)
    return [
        Figure.of(f"{name}: time", 1e3 * found.ours, "ms"),
        Figure.of(f"{name}: faster than published", found.ratios, "x"),
        Figure(f"{name}: memory beyond the logits", our_peak / 1e6, "MB"),
        Figure(f"{name}: less memory than published", peak / our_peak, "x"),
    ]


@dataclass(frozen=True)
class PublishedLoss:
    """The loss of a batch with label maps in the published steps: one dense target tensor, then the loss."""

    settings: Objective
    num_classes: int
    tokens_per_side: int
    dtype: torch.dtype = torch.float32

    def __call__(self, class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Box) -> Tensor:
        targets = self.targets(labels)
        crop, tokens = targets[:, :, 1], targets[:, :, 2:].mT.reshape(-1, self.num_classes)
        mixed = box.lam * crop + (1 - box.lam) * crop.flip(0)
        class_loss = _soft_cross_entropy(class_logits, mixed)
        token_loss = _soft_cross_entropy(token_logits.reshape(-1, self.num_classes), tokens)
        return self.settings.cls_weight * class_loss + self.settings.dense_weight * token_loss

    def targets(self, labels: Labels) -> Tensor:
        """Return targets of the true class, the crop and each token, (batch, classes, 2 + tokens)."""
        assert labels.maps is not None
        scores, ids = labels.maps.scores.to(self.dtype), labels.maps.ids.long()
        batch, _, height, width = scores.shape
        maps = scores.new_zeros(batch, self.num_classes, height, width)
        for number in range(batch):
            maps[number].scatter_(0, ids[number], scores[number])
        off = self.settings.smoothing / self.num_classes
        truth = scores.new_full((batch, self.num_classes), off)
        truth.scatter_(1, labels.classes.unsqueeze(1), 1 - self.settings.smoothing + off)
        crop, tokens = (
            _crops(maps, labels.maps.boxes.to(self.dtype), side).softmax(dim=1).flatten(2)
            * (1 - self.settings.smoothing + off)
            + off
            for side in (1, self.tokens_per_side)
        )
        return torch.cat([truth.unsqueeze(2), crop, tokens], dim=2)


def _crops(maps: Tensor, boxes: Tensor, side: int) -> Tensor:
    """Average (batch, classes, height, width) over the cells of each crop, (batch, classes, side, side)."""
    top, left, tall, wide = boxes.unbind(dim=1)
    rows = _averaging(top, tall, side, maps.shape[2]).unsqueeze(1)  # (batch, 1, side, height)
    columns = _averaging(left, wide, side, maps.shape[3]).unsqueeze(1)  # (batch, 1, side, width)
    return rows @ maps @ columns.mT


def _averaging(start: Tensor, extent: Tensor, side: int, size: int) -> Tensor:
    """Return the weight of every map cell in every output cell along one axis, (batch, side, size)."""
    low, high = start * size - 0.5, (start + extent) * size - 0.5  # (batch,) in cells
    bin_size = (high - low).clamp(min=1.0) / side
    samples = bin_size.ceil().clamp(max=math.ceil(size / side))
    first_bin = torch.arange(side, device=start.device) * bin_size[:, None] + low[:, None]  # (batch, side)
    cells = torch.arange(size, device=start.device)
    weights = start.new_zeros(len(start), side, size)
    for sample in range(math.ceil(size / side)):
        position = first_bin + ((sample + 0.5) * bin_size / samples)[:, None]  # (batch, side)
        position = position.clamp(0, size - 1).unsqueeze(2)
        counted = (sample < samples)[:, None, None]
        weights += (1 - (position - cells).abs()).clamp(min=0) * counted
    return weights / samples[:, None, None]


def _soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return -(target * logits.log_softmax(dim=-1)).sum(dim=-1).mean()
