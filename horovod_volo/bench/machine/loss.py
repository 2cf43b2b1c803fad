"""The sparse token-label loss, its targets and gradients against the published and the dense form.

Our loss overwrites the token logits by their gradient, so every call gets new ones, as in training; making
them is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from horovod_volo.bench.cli import Flag, Pairs
from horovod_volo.bench.comparison import Block, alternate, assert_agree, block_with_setup, default_device
from horovod_volo.bench.machine.peers_loss import DenseLoss, PublishedLoss
from horovod_volo.bench.memory import peak_extra_bytes
from horovod_volo.bench.results import Figure, Result
from horovod_volo.bench.synthetic import TOP, random_labels
from horovod_volo.config.schema import Objective
from horovod_volo.core.batch import Labels
from horovod_volo.core.errors import UserError
from horovod_volo.objective.loss import LabelMapTargets, build_loss
from horovod_volo.objective.mixing import Box

_TOLERANCE = 1e-5  # of ours, against float64
# At 21,841 classes the dense formula in fp32 differs by 2e-4 from itself in float64: its softmax sums the
# classes one by one.
_PEER_TOLERANCE = 1e-3
_COMPARED = ("the loss", "the gradient of class logits", "the gradient of token logits")

Loss = Callable[[Tensor, Tensor, Labels, Box], Tensor]


@dataclass(frozen=True)
class LossCase:
    """The inputs that all losses are given."""

    class_logits: Tensor
    token_logits: Tensor
    labels: Labels
    box: Box

    @classmethod
    def random(cls, batch_size: int, num_classes: int, side: int, device: torch.device) -> LossCase:
        """Draw one."""
        random = torch.Generator().manual_seed(1)
        shapes = ((batch_size, num_classes), (batch_size, side * side, num_classes))
        class_logits, token_logits = (
            torch.randn(shape, generator=random).to(device).requires_grad_() for shape in shapes
        )
        labels = random_labels(batch_size, num_classes, device, seed=0)
        return cls(class_logits, token_logits, labels, Box(0, 0, side // 2, side // 2, side))

    def new_logits(self) -> Tensor:
        """Return token logits as a network returns them: the result of an operation, used nowhere else."""
        return self.token_logits.clone()

    def run(self, loss: Loss, logits: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """Return the loss and the gradients of class logits and token logits."""
        total = loss(self.class_logits.to(dtype), logits.to(dtype), self.labels, self.box)
        return total, *torch.autograd.grad(total, (self.class_logits, logits))

    def assert_right(self, what: str, loss: Loss, expected: tuple[Tensor, ...], tolerance: float) -> None:
        """Raise unless the loss and its gradients are those of float64."""
        for part, value, right in zip(_COMPARED, self.run(loss, self.new_logits()), expected, strict=True):
            assert_agree(f"{part} of {what}, against float64", value, right, tolerance)

    def peak_bytes(self, loss: Loss) -> int:
        """Return the largest number of bytes allocated beyond the logits."""
        logits = self.new_logits()
        return peak_extra_bytes(lambda: self.run(loss, logits), logits.device)

    def block(self, loss: Loss) -> Block:
        """Make a timed block of calls."""
        return block_with_setup(
            self.new_logits, lambda logits: self.run(loss, logits), self.token_logits.device
        )


def measure(
    *,
    classes: Annotated[Sequence[int], Flag("numbers of classes, each measured in turn")] = (1000, 21841),
    batch_sizes: Annotated[
        Sequence[int],
        Flag("images; sizes after the first are measured with the first number of classes only"),
    ] = (8,),
    tokens_per_side: Annotated[int, Flag("side of the token grid; 14 is a 224 px image")] = 14,
    pairs: Pairs = 7,
) -> Result:
    """Compare the losses for each number of classes, and in each batch size for the first of them."""
    if min(classes) < TOP:
        raise UserError(
            f"--classes takes {TOP} or more: a label map has {TOP} different classes in every cell."
        )
    cases = [(number, batch_sizes[0]) for number in classes]
    cases += [(classes[0], batch_size) for batch_size in batch_sizes[1:]]
    figures = [figure for case in cases for figure in _compare(*case, tokens_per_side, pairs)]
    return Result("loss", "token-label loss: targets, loss and gradient, against two dense forms", figures)


def _compare(num_classes: int, batch_size: int, side: int, pairs: int) -> list[Figure]:
    settings = Objective(token_label=True, token_label_data="random")
    case = LossCase.random(batch_size, num_classes, side, default_device())
    name = f"{num_classes:,} classes, batch {batch_size}"
    sparse = build_loss(settings, num_classes, side)
    published = PublishedLoss(settings, num_classes, side)
    peers: dict[str, Loss] = {"published": published, "dense": DenseLoss(settings, num_classes, side)}

    def ours(class_logits: Tensor, token_logits: Tensor, labels: Labels, box: Box) -> Tensor:
        return sparse(class_logits, token_logits, labels, box).total

    exact = DenseLoss(settings, num_classes, side, torch.float64)
    expected = case.run(exact, case.token_logits, torch.float64)
    case.assert_right(f"ours at {name}", ours, expected, _TOLERANCE)
    for peer, loss in peers.items():
        case.assert_right(f"{peer} at {name}", loss, expected, _PEER_TOLERANCE)
    del expected  # before memory is measured

    teacher = LabelMapTargets(num_classes, side, settings.smoothing, settings.label_geometry)
    our_targets, their_targets = (
        peak_extra_bytes(targets, case.token_logits.device)
        for targets in (lambda: teacher(case.labels), lambda: published.targets(case.labels))
    )
    our_peak, our_block = case.peak_bytes(ours), case.block(ours)
    found = {peer: alternate(our_block, case.block(loss), pairs) for peer, loss in peers.items()}
    ratios = {peer: case.peak_bytes(loss) / our_peak for peer, loss in peers.items()}
    return [
        Figure.of_seconds(f"{name}: time", [seconds for pair in found.values() for seconds in pair.ours]),
        *(Figure.of_estimate(f"{name}: faster than {peer}", found[peer].times_faster, "x") for peer in peers),
        Figure(f"{name}: memory beyond the logits", our_peak / 1e6, "MB"),
        *(Figure(f"{name}: less memory than {peer}", ratios[peer], "x") for peer in peers),
        Figure(f"{name}: less memory than published, targets alone", their_targets / our_targets, "x"),
    ]
