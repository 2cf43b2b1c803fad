"""The sparse token-label loss, its targets and gradients against the published and the dense form.

Our loss overwrites the token logits by their gradient, so every call gets new ones, as in training; making
them is not timed. The peers are written out over all classes: `PublishedLoss` follows the published code step
by step, `DenseLoss` is the same formula in as few dense tensor operations as possible. Both crop the maps by
two matrix products where the published code calls RoIAlign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from horovod_volo.bench.cli import Flag, Pairs
from horovod_volo.bench.comparison import (
    alternate,
    assert_agree,
    block_with_setup,
    default_device,
    peak_extra_bytes,
)
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import TOP, random_labels
from horovod_volo.config.objective_settings import Objective
from horovod_volo.core.batch import Labels
from horovod_volo.core.errors import UserError
from horovod_volo.objective.loss import LabelMapTargets, build_loss
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
    return Result("loss", "token-label loss: targets, loss and gradient, against two dense forms", figures)


def _compare(num_classes: int, batch_size: int, pairs: int) -> list[Figure]:
    settings = Objective(token_label=True, token_label_data="random")
    name = f"{num_classes:,} classes, batch {batch_size}"
    sparse = build_loss(settings, num_classes, _SIDE)
    published = PublishedLoss(settings, num_classes, _SIDE)
    peers: dict[str, DenseLoss] = {"published": published, "dense": DenseLoss(settings, num_classes, _SIDE)}
    random, device = torch.Generator().manual_seed(1), default_device()
    class_logits, token_logits = (
        torch.randn(shape, generator=random).to(device).requires_grad_()
        for shape in ((batch_size, num_classes), (batch_size, _SIDE**2, num_classes))
    )
    labels, box = random_labels(batch_size, num_classes, device, 0), Box(0, 0, _SIDE // 2, _SIDE // 2, _SIDE)

    def ours(class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Box) -> Tensor:
        return sparse(class_logits, token_logits, labels, box).total

    def run(loss: LossFunction, logits: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return the loss and the gradients of class logits and token logits."""
        total = loss(class_logits.to(dtype), logits.to(dtype), labels, box)
        return [total, *torch.autograd.grad(total, (class_logits, logits))]

    exact = DenseLoss(settings, num_classes, _SIDE, torch.float64)
    losses: dict[str, LossFunction] = {"ours": ours, **peers}
    expected = run(exact, token_logits, torch.float64)
    for what, loss in losses.items():
        tolerance = _TOLERANCE if what == "ours" else _PEER_TOLERANCE
        for part, value, right in zip(_COMPARED, run(loss, token_logits.clone()), expected, strict=True):
            assert_agree(f"{part} of {what} at {name}, against float64", value, right, tolerance)
    del expected, value, right  # before memory is measured

    teacher = LabelMapTargets(num_classes, _SIDE, settings.smoothing, settings.label_geometry)
    # As a network returns them, logits are the result of an operation and used nowhere else.
    blocks, peaks = {}, {}
    for what, loss in losses.items():
        blocks[what] = block_with_setup(token_logits.clone, partial(run, loss), device)
        peaks[what] = peak_extra_bytes(partial(run, loss, token_logits.clone()), device)
    our_targets, their_targets = (
        peak_extra_bytes(partial(targets, labels), device) for targets in (teacher, published.targets)
    )
    found = {peer: alternate(blocks["ours"], blocks[peer], pairs) for peer in peers}
    return [
        Figure.of_seconds(f"{name}: time", np.concatenate([times.ours for times in found.values()])),
        *(Figure.of(f"{name}: faster than {peer}", found[peer].ratios, "x") for peer in peers),
        Figure(f"{name}: memory beyond the logits", peaks["ours"] / 1e6, "MB"),
        *(Figure(f"{name}: less memory than {peer}", peaks[peer] / peaks["ours"], "x") for peer in peers),
        Figure(f"{name}: less memory than published, targets alone", their_targets / our_targets, "x"),
    ]


@dataclass(frozen=True)
class DenseLoss:
    """The loss of a batch with label maps, through dense targets (classes x tokens)."""

    settings: Objective
    num_classes: int
    tokens_per_side: int
    dtype: torch.dtype = torch.float32

    def __call__(self, class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Box) -> Tensor:
        """Return the weighted sum of the class loss and the token loss."""
        of_class, of_tokens = self._targets_of_heads(labels)
        mixed = box.lam * of_class + (1 - box.lam) * of_class.flip(0)
        class_loss = _soft_cross_entropy(class_logits, mixed)
        token_loss = _soft_cross_entropy(token_logits.reshape(-1, self.num_classes), of_tokens)
        return self.settings.cls_weight * class_loss + self.settings.dense_weight * token_loss

    def _targets_of_heads(self, labels: Labels) -> tuple[Tensor, Tensor]:
        """Return the targets of classes (batch, classes) and of tokens (batch x tokens, classes)."""
        scores, ids, boxes = _maps(labels, self.dtype)
        batch, _, height, width = scores.shape
        maps = scores.new_zeros(batch, self.num_classes, height, width)
        maps.scatter_(1, ids, scores)
        of_crop, of_tokens = (
            self._smoothed(_crops(maps, boxes, side).softmax(dim=1).flatten(2).mT).flatten(0, 1)
            for side in (1, self.tokens_per_side)
        )
        return of_crop, of_tokens

    def _smoothed(self, targets: Tensor) -> Tensor:
        off = self.settings.smoothing / self.num_classes
        return targets * (1 - self.settings.smoothing + off) + off


class PublishedLoss(DenseLoss):
    """The same in the published steps: one target tensor, then the loss."""

    def _targets_of_heads(self, labels: Labels) -> tuple[Tensor, Tensor]:
        target = self.targets(labels)
        return target[:, :, 1], target[:, :, 2:].transpose(1, 2).reshape(-1, self.num_classes)

    def targets(self, labels: Labels) -> Tensor:
        """Return targets of the true class, the crop and each token, (batch, classes, 2 + tokens)."""
        scores, ids, boxes = _maps(labels, self.dtype)
        batch, _, height, width = scores.shape
        maps = torch.zeros(batch, self.num_classes, height, width, device=scores.device)
        for number in range(batch):
            maps[number].scatter_(0, ids[number], scores[number])
        off = self.settings.smoothing / self.num_classes
        truth = torch.full((batch, self.num_classes), off, device=scores.device)
        truth.scatter_(1, labels.classes.unsqueeze(1), 1 - self.settings.smoothing + off)
        of_crop, of_tokens = (
            self._smoothed(_crops(maps, boxes, side).softmax(dim=1).flatten(2))
            for side in (1, self.tokens_per_side)
        )
        return torch.cat([truth.unsqueeze(2), of_crop, of_tokens], dim=2)


def _maps(labels: Labels, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores and ids, (batch, k, height, width) in `dtype` and int64, and boxes in `dtype`."""
    assert labels.maps is not None
    maps = labels.maps
    return maps.scores.to(dtype), maps.ids.long(), maps.boxes.to(dtype)


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
