"""The sparse token-label loss against the dense formula: targets, loss and gradient of one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from horovod_volo.bench.agreement import assert_agree
from horovod_volo.bench.memory import peak_extra_bytes
from horovod_volo.bench.pairs import alternate, repeats_for, timed
from horovod_volo.bench.peers_loss import DenseLoss
from horovod_volo.bench.random_labels import TOP, random_labels
from horovod_volo.bench.results import Figure, Result
from horovod_volo.config.errors import UserError
from horovod_volo.config.schema import Objective
from horovod_volo.objective.loss import build_loss
from horovod_volo.objective.mixtoken import Box

# At 21,841 classes the dense formula in fp32 is 2e-4 away from itself in float64, ours 6e-7: its softmax
# adds up the classes one by one.
_TOLERANCE = 1e-3
_COMPARED = ("the loss", "the gradient of class logits", "the gradient of token logits")
_MILLISECONDS = 1e3


def measure(*, batch_size: int, classes: list[int], tokens_per_side: int, pairs: int) -> Result:
    """Compare both losses for each number of classes."""
    if min(classes) < TOP:
        raise UserError(
            f"--classes takes {TOP} or more: a label map names {TOP} different ones in every cell."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    figures = [
        figure
        for number in classes
        for figure in _compare(batch_size, number, tokens_per_side, pairs, device)
    ]
    title = f"token-label loss, forward and backward, batch {batch_size}, against its dense formula"
    return Result("loss", title, figures)


def _compare(batch_size: int, num_classes: int, side: int, pairs: int, device: torch.device) -> list[Figure]:
    settings = Objective(token_label=True, token_label_data="random")
    labels = random_labels(batch_size, num_classes, device, seed=0)
    box = Box(top=0, left=0, height=side // 2, width=side // 2, grid=side)
    random = torch.Generator().manual_seed(1)
    class_logits = torch.randn(batch_size, num_classes, generator=random).to(device).requires_grad_()
    token_shape = (batch_size, side * side, num_classes)
    token_logits = torch.randn(token_shape, generator=random).to(device).requires_grad_()
    sparse_loss = build_loss(settings, num_classes, side)
    dense_loss = DenseLoss(settings, num_classes, side)

    def ours() -> tuple[Tensor, ...]:
        total = sparse_loss(class_logits, token_logits, labels, box).total
        return total, *torch.autograd.grad(total, (class_logits, token_logits))

    def peer() -> tuple[Tensor, ...]:
        total = dense_loss(class_logits, token_logits, labels, box)
        return total, *torch.autograd.grad(total, (class_logits, token_logits))

    for what, our_value, peer_value in zip(_COMPARED, ours(), peer(), strict=True):
        assert_agree(f"{what} at {num_classes} classes", our_value, peer_value, _TOLERANCE)
    less_memory = peak_extra_bytes(peer, device) / peak_extra_bytes(ours, device)
    our_block = timed(ours, repeats_for(ours, device), device)
    peer_block = timed(peer, repeats_for(peer, device), device)
    result = alternate(our_block, peer_block, pairs)
    case = f"{num_classes:,} classes"
    return [
        Figure.of(f"{case}: time", [_MILLISECONDS * seconds for seconds in result.ours], "ms"),
        Figure.of_estimate(f"{case}: faster than dense", result.times_faster, "x"),
        Figure(f"{case}: less memory than dense", less_memory, "x"),
    ]
