"""Muon for hidden matrices, AdamW for all other parameters. Given the averaged gradients, each rank
orthogonalises its share of the matrices' momenta; one message then gives all ranks all updates.

    m <- beta m + (1 - beta) g
    O <- orthogonalised beta m + (1 - beta) g
    w <- (1 - lr decay) w - lr 0.2 sqrt(max(rows, columns)) O

The root mean square of the elements of an orthogonal matrix is 1 / sqrt(max(rows, columns)), so that of an
update is 0.2 lr, about as large as AdamW's: both take the same learning rate and the same weight decay.

Invariants: every rank keeps all momenta, so that the state is the same on all ranks and does not depend on
their number; all ranks apply the same bytes of each update; and nothing changes before these have arrived, so
that an elastic run which loses a rank meanwhile goes on from the whole state before the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from horovod_volo.optim.adamw import AdamW
from horovod_volo.optim.orthogonal import Shape, arithmetic, assign_matrices, orthogonalize

MATRICES = "matrices"  # the key that marks a group of hidden matrices
_RMS = 0.2  # of the elements of an update at a learning rate of 1
_MESSAGE = "muon.updates"


class MatrixRanks(Protocol):
    """The ranks that share the matrices."""

    rank: int
    size: int

    def concatenate_async(self, part: Tensor, name: str) -> Callable[[], Tensor]:
        """Start to concatenate the flat tensors of all ranks, in their order. Collective."""


class OneRank:
    """A rank that orthogonalises all matrices itself."""

    rank, size = 0, 1

    def concatenate_async(self, part: Tensor, name: str) -> Callable[[], Tensor]:  # noqa: ARG002
        """Return a function that returns `part`."""
        return lambda: part


class Muon(AdamW):
    """Muon for the groups with the key `matrices`, AdamW for the others."""

    ranks: MatrixRanks = OneRank()

    def __init__(
        self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float, momentum: float
    ) -> None:
        super().__init__(groups, betas=betas, eps=eps)
        self._momentum = momentum
        # An overflow must skip the whole step: GradScaler waits for the device to know.
        self._step_supports_amp_scaling = False

    def _elementwise_groups(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if MATRICES not in group]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take one step. Collective if there are several ranks."""
        if not self._matrices.weights:
            super().step()
            return
        updates = self.ranks.concatenate_async(self._own_updates(), _MESSAGE)()
        torch._foreach_lerp_(self._momenta, self._gradients(), 1 - self._momentum)
        super().step()
        self._apply(updates)

    @cached_property
    def _matrices(self) -> _SharedMatrices:
        groups = [group for group in self.param_groups if MATRICES in group]
        weights = (weight for group in groups for weight in group["params"])
        return _SharedMatrices((weight for weight in weights if weight.requires_grad), self.ranks)

    @cached_property
    def _momenta(self) -> list[Tensor]:
        return [self.state[weight]["momentum_buffer"] for weight in self._matrices.weights]

    def _gradients(self) -> list[Any]:
        return [weight.grad for weight in self._matrices.weights]

    def _own_updates(self) -> Tensor:
        """Return the updates of this rank's matrices at a learning rate of 1, one after the other."""
        shared, gradients = self._matrices, self._gradients()
        updates = dict[int, Tensor]()
        for numbers in shared.own_batches:
            own = [gradients[each] for each in numbers]
            momenta = torch._foreach_lerp([self._momenta[each] for each in numbers], own, 1 - self._momentum)
            directions = torch._foreach_lerp(own, momenta, self._momentum)
            shapes = [shared.shapes[each] for each in numbers]
            batch = torch.stack([_wide(*pair) for pair in zip(directions, shapes, strict=True)])
            batch = orthogonalize(batch).mul_(_RMS * max(shapes[0]) ** 0.5)
            for number, shape, matrix in zip(numbers, shapes, batch, strict=True):
                updates[number] = (matrix if shape == shape.wide else matrix.T).reshape(-1)
        nothing = shared.weights[0].new_empty(0, dtype=arithmetic(shared.weights[0]))
        return torch.cat([nothing, *(updates[number] for number in shared.own)])

    def _apply(self, updates: Tensor) -> None:
        """Change the weights by the updates of all matrices, rank by rank."""
        updates = updates.to(self._matrices.weights[0].dtype)
        views = self._matrices.views_of(updates)
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight in views]
            if weights:
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, [views[weight] for weight in weights], alpha=-group["lr"])


class _SharedMatrices:
    """The matrices, which of them this rank orthogonalises, and where each lies in the message of all."""

    def __init__(self, weights: Iterable[Parameter], ranks: MatrixRanks) -> None:
        self.weights = list(weights)
        self.shapes = [Shape(len(weight), weight[0].numel()) for weight in self.weights]
        of_ranks = assign_matrices(self.shapes, ranks.size)
        self.own = of_ranks[ranks.rank]
        batches = defaultdict[Shape, list[int]](list)
        for number in self.own:
            batches[self.shapes[number].wide].append(number)
        self.own_batches = list(batches.values())
        self._in_message = [number for of_rank in of_ranks for number in of_rank]
        self._ends = list(accumulate(self.shapes[number].elements for number in self._in_message))

    def views_of(self, message: Tensor) -> dict[Parameter, Tensor]:
        """Return each weight's part of the message of all ranks, in the weight's shape."""
        starts = [0, *self._ends]
        parts = {
            number: message[start:end]
            for number, start, end in zip(self._in_message, starts[:-1], self._ends, strict=True)
        }
        return {weight: parts[number].view(weight.shape) for number, weight in enumerate(self.weights)}


def share_matrices(optimizer: Optimizer, ranks: MatrixRanks) -> None:
    """Let ranks share the work of Muon; there is nothing to share in other optimizers."""
    if isinstance(optimizer, Muon):
        optimizer.ranks = ranks


def _wide(tensor: Tensor, shape: Shape) -> Tensor:
    matrix = tensor.reshape(shape)
    return matrix if shape == shape.wide else matrix.T
