"""Fits the classifier of a network to the features of the training images (--fit-head).

It is a multinomial logistic regression, whose L2 strength a fifth of these images selects.

Invariant: the classifier does not depend on how the images are divided among ranks, up to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.core.batch import NO_CLASS
from horovod_volo.core.errors import UserError
from horovod_volo.data.loader import EvalLoader
from horovod_volo.engine.task import Beat, StoppedError
from horovod_volo.monitor.progress import ThroughputLine

# L2 strengths of the mean loss, for features of variance 1, the strongest first.
_STRENGTHS = tuple(10.0**-power for power in range(6))
_HELD_OUT = 5  # every fifth image; lists of images are sorted by class
_MAX_ITERATIONS = 300
_ROWS = 4096  # features that are converted to fp64 at once


class Features(NamedTuple):
    """The features of this rank's images."""

    values: Tensor  # (images, features)
    classes: Tensor  # (images,)
    held_out: Tensor  # (images,) whether they select the strength of L2

    def part(self, *, held_out: bool) -> Features:
        """Return those that select the strength, or the others."""
        return Features(*(each[self.held_out == held_out] for each in self))


def linear_head(network: nn.Module, heads: Sequence[str]) -> nn.Linear:
    """Return the only layer that computes logits; raise UserError unless it is linear."""
    modules: Mapping[str, nn.Module] = dict(network.named_modules())
    found = [modules[name] for name in heads if name in modules]
    if len(found) == 1 and isinstance(found[0], nn.Linear) and found[0].bias is not None:
        return found[0]
    raise UserError(
        "--fit-head is for networks with one linear classifier, and for class labels: add --no-token-label, "
        "use another --model, or drop --fit-head."
    )


def fit_head(
    networks: Sequence[nn.Module],
    heads: Sequence[str],
    loader: EvalLoader,
    images: int,
    world: World,
    stop_requested: Callable[[], bool],
    beat: Beat,
) -> str:
    """Fit the head of the first network, copy it to the others, and return a line for the log.

    `loader` has this rank's part of all `images`. Collective: every rank calls this; see `before_first_step`.
    """
    began = time.monotonic()
    head = linear_head(networks[0], heads)

    def check() -> None:
        beat(0)
        if world.sum_over_ranks(stop_requested()) != [0]:
            raise StoppedError

    features = _compute_features(networks[0], head, loader, images, world, check)
    computed = time.monotonic()
    fit = _Fit(features, head.out_features, world, check)
    strength = fit.solve()
    with torch.no_grad():
        for network in networks:
            own = linear_head(network, heads)
            own.weight.copy_(fit.point[:, :-1])
            own.bias.copy_(fit.point[:, -1])
    return (
        f"classifier fitted to the features of {fit.images:,.0f} images: {computed - began:.0f} s for the "
        f"features, {time.monotonic() - computed:.0f} s for the fit, with L2 of strength {strength:g}"
    )


def _compute_features(
    network: nn.Module,
    head: nn.Linear,
    loader: EvalLoader,
    images: int,
    world: World,
    check: Callable[[], None],
) -> Features:
    """Return the features of this rank's images, without damaged ones. Collective."""
    inputs: list[Tensor] = []
    rows: list[Features] = []
    show = ThroughputLine("training images have features", shown=world.is_rank_zero)
    hook = head.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    batches, largest = iter(loader), -(-images // world.size)
    device = head.weight.device
    try:
        show(0, images)
        for done in range(0, largest, loader.batch_size):
            check()
            batch = next(batches, None)  # a rank may have an image, and a batch, less than others
            if batch is None:
                continue
            with torch.no_grad():
                network(batch.images)
            usable = batch.classes != NO_CLASS
            held_out = torch.from_numpy(batch.indices % _HELD_OUT == 0).to(device)
            row = Features(inputs.pop().float(), batch.classes, held_out)
            rows.append(Features(*(each[usable] for each in row)))
            show(min(images, (done + loader.batch_size) * world.size), images)
    finally:
        hook.remove()
    if not rows:
        return Features(
            torch.zeros(0, head.in_features, device=device),
            torch.zeros(0, dtype=torch.int64, device=device),
            torch.zeros(0, dtype=torch.bool, device=device),
        )
    return Features(*(torch.cat(columns) for columns in zip(*rows, strict=True)))


class _Fit:
    """A logistic regression on the features of all ranks, whose optimum is at `point`.

    Rank 0 alone decides where to go: in rounding, processors of another kind would decide otherwise.
    """

    def __init__(self, features: Features, classes: int, world: World, check: Callable[[], None]) -> None:
        self._world, self._check = world, check
        self._all = features
        values = features.values.double()
        width, device = values.shape[1], values.device
        sums = world.sum(torch.cat([values.new_full((1,), len(values)), values.sum(0)]), "features")
        self.images = sums[0].item()
        self._mean = sums[1:] / self.images
        squares = world.sum((values - self._mean).square().sum(0), "features") / self.images
        if not squares.isfinite().all():
            raise UserError("The features of the network are not finite. Check the weights, or --precision.")
        self._scale = squares.sqrt().clamp(min=1e-6)
        self.point = torch.zeros(classes, width + 1, dtype=torch.float64, device=device)
        self._at_minimum = torch.zeros(1, device=device)

    def solve(self) -> float:
        """Find the optimum for the strength at which held-out images have the least loss; return that."""
        best, chosen = float("inf"), _STRENGTHS[0]
        for strength in _STRENGTHS:
            self._minimize(strength, self._all.part(held_out=False))
            loss, images = self._sums(self._all.part(held_out=True))[:2].tolist()
            if loss / max(images, 1) >= best:
                break
            best, chosen = loss / max(images, 1), strength
        self._minimize(chosen, self._all)
        # For features as the network gives them.
        self.point[:, :-1] /= self._scale
        self.point[:, -1] -= self.point[:, :-1] @ self._mean
        return chosen

    def _minimize(self, strength: float, rows: Features) -> None:
        """Move to the minimum of the mean loss, plus half the strength times the squared norm of weights."""

        def penalized() -> float:
            sums, weights = self._sums(rows), self.point[:, :-1]
            count = max(sums[1].item(), 1)
            self.point.grad = sums[2:].view_as(self.point) / count
            self.point.grad[:, :-1] += strength * weights
            return sums[0].item() / count + strength / 2 * weights.square().sum().item()

        if self._world.is_rank_zero:
            torch.optim.LBFGS(
                [self.point],
                max_iter=_MAX_ITERATIONS,
                tolerance_grad=1e-7,
                tolerance_change=1e-12,
                line_search_fn="strong_wolfe",
            ).step(penalized)
            self._at_minimum.fill_(1)
        while not self._at_minimum:
            self._sums(rows)
        if self._world.is_rank_zero:
            self._sums(rows)  # tells the others
        self._at_minimum.zero_()

    def _sums(self, rows: Features) -> Tensor:
        """Return the loss of all ranks' rows at the point of rank 0, their number, and the gradient."""
        self._check()
        self._world.broadcast_([self._at_minimum, self.point])
        point = self.point.detach().requires_grad_()
        loss = torch.zeros((), dtype=torch.float64, device=point.device)
        for values, classes in zip(rows.values.split(_ROWS), rows.classes.split(_ROWS), strict=True):
            standardized = (values.double() - self._mean) / self._scale
            logits = F.linear(standardized, point[:, :-1], point[:, -1])
            part = F.cross_entropy(logits, classes, reduction="sum")
            part.backward()
            loss += part.detach()
        gradient = torch.zeros_like(point) if point.grad is None else point.grad
        own = torch.cat([torch.stack([loss, loss.new_tensor(len(rows.values))]), gradient.flatten()])
        return self._world.sum(own, "classifier")
