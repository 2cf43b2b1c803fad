"""The sparse token-label loss against the published steps and the dense formula: targets, loss and gradient.

Ours overwrites the token logits by their gradient, so every call gets fresh ones, as in training; making
them is not measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from horovod_volo.bench import pairs as blocks
from horovod_volo.bench.agreement import assert_agree
from horovod_volo.bench.memory import peak_extra_bytes
from horovod_volo.bench.pairs import Block, alternate, wait_for
from horovod_volo.bench.peers_loss import DenseLoss, PublishedLoss
from horovod_volo.bench.random_labels import TOP, random_labels
from horovod_volo.bench.results import Figure, Result
from horovod_volo.config.schema import Objective
from horovod_volo.core.errors import UserError
from horovod_volo.core.labels import Labels
from horovod_volo.objective.loss import LabelMapTargets, build_loss
from horovod_volo.objective.mixtoken import Box

_TOLERANCE = 1e-5  # of ours, against float64
# At 21,841 classes the dense formula in fp32 is 2e-4 away from itself in float64: its softmax adds up the
# classes one by one.
_PEER_TOLERANCE = 1e-3
_COMPARED = ("the loss", "the gradient of class logits", "the gradient of token logits")
_MILLISECONDS = 1e3
_MEGABYTE = 1e6

Loss = Callable[[Tensor, Tensor, Labels, Box], Tensor]


@dataclass(frozen=True)
class _Case:
    """What all losses are given."""

    class_logits: Tensor
    token_logits: Tensor
    labels: Labels
    box: Box

    @classmethod
    def random(cls, batch_size: int, num_classes: int, side: int, device: torch.device) -> _Case:
        random = torch.Generator().manual_seed(1)
        shapes = ((batch_size, num_classes), (batch_size, side * side, num_classes))
        class_logits, token_logits = (
            torch.randn(shape, generator=random).to(device).requires_grad_() for shape in shapes
        )
        labels = random_labels(batch_size, num_classes, device, seed=0)
        return cls(class_logits, token_logits, labels, Box(0, 0, side // 2, side // 2, side))

    def fresh_logits(self) -> Tensor:
        """Return token logits as a network gives them: of a graph, and nobody else's."""
        return self.token_logits.clone()

    def run(self, loss: Loss, given: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """Return the loss, and the gradients of class logits and token logits."""
        total = loss(self.class_logits.to(dtype), given.to(dtype), self.labels, self.box)
        return total, *torch.autograd.grad(total, (self.class_logits, given))

    def peak(self, loss: Loss) -> int:
        """Return the most bytes held beyond the logits."""
        given = self.fresh_logits()
        return peak_extra_bytes(lambda: self.run(loss, given), given.device)

    def timed(self, loss: Loss) -> Block:
        """Make a block of calls, each from an idle device to an idle device."""
        device = self.token_logits.device

        def seconds() -> float:
            given = self.fresh_logits()
            wait_for(device)
            began = perf_counter()
            self.run(loss, given)
            wait_for(device)
            return perf_counter() - began

        seconds()  # the first call pays for what is built only once
        repeats = max(1, math.ceil(blocks.BLOCK_SECONDS / seconds()))
        return lambda: sum(seconds() for _ in range(repeats)) / repeats


def measure(*, batch_sizes: list[int], classes: list[int], tokens_per_side: int, pairs: int) -> Result:
    """Compare the losses for each number of classes, and the first of these in each batch size."""
    if min(classes) < TOP:
        raise UserError(
            f"--classes takes {TOP} or more: a label map names {TOP} different ones in every cell."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = [(number, batch_sizes[0]) for number in classes]
    cases += [(classes[0], batch_size) for batch_size in batch_sizes[1:]]
    figures = [
        figure
        for number, batch_size in cases
        for figure in _compare(batch_size, number, tokens_per_side, pairs, device)
    ]
    title = "token-label loss: targets, loss and gradient, against two dense forms"
    return Result("loss", title, figures)


def _compare(batch_size: int, num_classes: int, side: int, pairs: int, device: torch.device) -> list[Figure]:
    settings = Objective(token_label=True, token_label_data="random")
    case = _Case.random(batch_size, num_classes, side, device)
    name = f"{num_classes:,} classes, batch {batch_size}"
    sparse_loss, published = (
        build_loss(settings, num_classes, side),
        PublishedLoss(settings, num_classes, side),
    )
    peers: dict[str, Loss] = {"published": published, "dense": DenseLoss(settings, num_classes, side)}

    def ours(class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Box) -> Tensor:
        return sparse_loss(class_logits, token_logits, labels, box).total

    exact = DenseLoss(settings, num_classes, side, torch.float64)
    expected = case.run(exact, case.token_logits, torch.float64)
    _assert_right(f"ours at {name}", case.run(ours, case.fresh_logits()), expected, _TOLERANCE)
    for peer, loss in peers.items():
        _assert_right(f"{peer} at {name}", case.run(loss, case.fresh_logits()), expected, _PEER_TOLERANCE)
    del expected

    teacher = LabelMapTargets(num_classes, side, settings.smoothing, settings.label_geometry)
    our_targets = peak_extra_bytes(lambda: teacher(case.labels), device)
    their_targets = peak_extra_bytes(lambda: published.targets(case.labels), device)
    our_peak, our_block = case.peak(ours), case.timed(ours)
    against = {peer: alternate(our_block, case.timed(loss), pairs) for peer, loss in peers.items()}
    milliseconds = [_MILLISECONDS * seconds for found in against.values() for seconds in found.ours]
    return [
        Figure.of(f"{name}: time", milliseconds, "ms"),
        *(
            Figure.of_estimate(f"{name}: faster than {peer}", against[peer].times_faster, "x")
            for peer in peers
        ),
        Figure(f"{name}: memory beyond the logits", our_peak / _MEGABYTE, "MB"),
        *(
            Figure(f"{name}: less memory than {peer}", case.peak(peers[peer]) / our_peak, "x")
            for peer in peers
        ),
        Figure(f"{name}: less memory than published, targets alone", their_targets / our_targets, "x"),
    ]


def _assert_right(
    what: str, found: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float
) -> None:
    for part, value, right in zip(_COMPARED, found, expected, strict=True):
        assert_agree(f"{part} of {what}, against float64", value, right, tolerance)
