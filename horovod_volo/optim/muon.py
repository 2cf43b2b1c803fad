"""Muon for hidden matrices, AdamW for all other parameters. Given the averaged gradients, each rank
orthogonalises some of the matrices' momenta; one message then gives all ranks all updates.

    m <- beta m + (1 - beta) g
    O <- orthogonalised beta m + (1 - beta) g
    w <- (1 - lr decay) w - lr 0.2 sqrt(max(rows, columns)) O

The root mean square of the elements of an orthogonal matrix is 1 / sqrt(max(rows, columns)), so that of an
update is 0.2 lr, about as large as AdamW's: both take the same learning rate and the same weight decay.

A matrix U S V' is orthogonalised by Newton-Schulz iterations: it becomes U f(S / |S|) V', where f brings each
singular value close to 1 by five steps of s <- a s + b s^3 + c s^5. All steps are matrix products.

Invariants: every rank keeps all momenta, so that the state is the same on all ranks and does not depend on
their number; all ranks apply the same bytes of each update; and nothing changes before these have arrived, so
that ranks which lose another one meanwhile go on from the whole state before the step. Which rank has
which matrix is a function of the shapes and the number of ranks alone, so that all ranks know it.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from horovod_volo.optim.build import ADAM_STATE, BETAS, MATRICES, MOMENTUM_STATE, register_optimizer

_RMS = 0.2  # of the elements of an update at a learning rate of 1
_MESSAGE = "muon.updates"
# Keller Jordan's, of the first description of Muon: steep at 0, so that small singular values rise quickly.
# In return the results are not 1, but between 0.68 and 1.13.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
# Matrices of a smaller norm get smaller results: the norm sums squares, which would vanish in fp32.
_SMALLEST_NORM = 1e-15


class OneRank:
    """A rank that orthogonalises all matrices itself, in place of `cluster.world.World`."""

    rank, size = 0, 1

    def concatenate_async(self, part: Tensor, name: str) -> Callable[[], Tensor]:  # noqa: ARG002
        """Return a function that returns `part`; with several ranks, the parts of all. Collective."""
        return lambda: part


def matrix_flops(rows: int, columns: int) -> int:
    """Return the floating-point operations of the iterations: three products in each."""
    short, long = sorted((rows, columns))
    return STEPS * (4 * short**2 * long + 2 * short**3)


def arithmetic(tensor: Tensor) -> torch.dtype:
    """Return the type in which a tensor is orthogonalised: bf16 on a GPU, the tensor's own on a CPU."""
    return torch.bfloat16 if tensor.device.type == "cuda" else tensor.dtype


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return a batch (count, rows, columns) with rows <= columns, each matrix orthogonalised; 0 stays 0."""
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    matrices = (matrices / norms.clamp(min=_SMALLEST_NORM)).to(arithmetic(matrices))
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(STEPS):
        gram = matrices @ matrices.mT  # (count, rows, rows)
        factor = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        matrices = torch.baddbmm(matrices, factor, matrices, beta=linear)
    return matrices


def assign_matrices(flops: Sequence[int], ranks: int) -> list[list[int]]:
    """Return for each rank the numbers of its matrices, in ascending order.

    The costliest matrix that is left goes to the rank with the least work so far, the first of several.
    """
    work, numbers = [0] * ranks, list[list[int]]([] for _ in range(ranks))
    for number in sorted(range(len(flops)), key=lambda number: -flops[number]):
        rank = work.index(min(work))
        work[rank] += flops[number]
        numbers[rank].append(number)
    return [sorted(of_rank) for of_rank in numbers]


class Muon(Optimizer):
    """Muon for the groups with the key `matrices`, AdamW for the others.

    As an overflow must skip the whole step, it leaves that to GradScaler, which waits for the device.
    """

    ranks: Any = OneRank()

    def __init__(
        self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float, momentum: float
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._momentum = momentum
        # It shares the groups, and so their learning rates, and the state.
        others = [group for group in self.param_groups if MATRICES not in group] or [{"params": []}]
        self._adamw = AdamW(others, lr=0.0, betas=betas, eps=eps, fused=True)
        self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Take one step. Collective if there are several ranks."""
        if not self._matrices:
            self._adamw.step()
            return
        updates = self.ranks.concatenate_async(self._own_updates(), _MESSAGE)()
        gradients: list[Any] = [weight.grad for weight in self._matrices]
        torch._foreach_lerp_(self._momenta, gradients, 1 - self._momentum)
        self._adamw.step()
        self._apply(updates)

    @cached_property
    def _matrices(self) -> list[Parameter]:
        groups = [group for group in self.param_groups if MATRICES in group]
        return [weight for group in groups for weight in group["params"] if weight.requires_grad]

    @cached_property
    def _assignment(self) -> list[list[int]]:
        flops = [matrix_flops(len(weight), weight[0].numel()) for weight in self._matrices]
        return assign_matrices(flops, self.ranks.size)

    @cached_property
    def _momenta(self) -> list[Tensor]:
        return [self.state[weight]["momentum_buffer"] for weight in self._matrices]

    def _own_updates(self) -> Tensor:
        """Return the updates of this rank's matrices at a learning rate of 1, one after the other."""
        own = self._assignment[self.ranks.rank]
        batches = defaultdict[tuple[int, ...], list[int]](list)  # by shape, the shorter side first
        for number in own:
            weight = self._matrices[number]
            batches[tuple(sorted((len(weight), weight[0].numel())))].append(number)
        updates = dict[int, Tensor]()
        for (short, long), numbers in batches.items():
            gradients: list[Any] = [self._matrices[each].grad for each in numbers]
            momenta = torch._foreach_lerp(
                [self._momenta[each] for each in numbers], gradients, 1 - self._momentum
            )
            directions = torch._foreach_lerp(gradients, momenta, self._momentum)
            matrices = [each.reshape(len(each), -1) for each in directions]
            batch = torch.stack([each if len(each) == short else each.T for each in matrices])
            batch = orthogonalize(batch).mul_(_RMS * long**0.5)
            for number, matrix, update in zip(numbers, matrices, batch, strict=True):
                updates[number] = (update if len(matrix) == short else update.T).reshape(-1)
        nothing = self._matrices[0].new_empty(0, dtype=arithmetic(self._matrices[0]))
        return torch.cat([nothing, *(updates[number] for number in own)])

    def _apply(self, updates: Tensor) -> None:
        """Change the weights by the updates of all matrices, rank by rank."""
        weights = [self._matrices[number] for of_rank in self._assignment for number in of_rank]
        parts = torch.split(updates.to(weights[0].dtype), [weight.numel() for weight in weights])
        views = {weight: part.view(weight.shape) for weight, part in zip(weights, parts, strict=True)}
        for group in self.param_groups:
            own = [weight for weight in group["params"] if weight in views]
            if own:
                torch._foreach_mul_(own, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(own, [views[weight] for weight in own], alpha=-group["lr"])


register_optimizer(
    "muon",
    partial(Muon, betas=BETAS, eps=1e-8),
    state_keys=ADAM_STATE,
    matrix_state_keys=MOMENTUM_STATE,
)
