"""Fits the classifier of a network to the features of the training images (--fit-head).

It is a multinomial logistic regression, whose L2 strength a fifth of these images selects. Invariant: it does
not depend on how the images are divided among ranks, up to rounding.
"""

from collections.abc import Callable
from contextlib import closing
from itertools import zip_longest
from time import monotonic
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from horovod_volo.cluster.world import World
from horovod_volo.core.batch import NO_CLASS
from horovod_volo.core.errors import UserError
from horovod_volo.data.loader import EvalLoader
from horovod_volo.engine.classification import ClassificationLearner
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.log_point import log_bad_samples
from horovod_volo.models.build import linear_head, start_training
from horovod_volo.monitor.progress import ThroughputLine

# Of the mean loss, for features of variance 1, the strongest first.
_STRENGTHS = tuple(10.0**-power for power in range(6))
_SELECTING = 5  # every fifth image selects the strength; lists are sorted by class


def fit_head(context: TrainContext) -> bool:
    """Fit the classifier and return True; after a stop request return False. Collective."""
    networks = [context.state.model, *context.state.average.models().values()]
    heads = [linear_head(network, context.state.heads) for network in networks]
    learner, world = cast(ClassificationLearner, context.learner), context.world
    effect, context.stop.effect = context.stop.effect, "the run stops, and has nothing to save yet"
    began = monotonic()

    def check() -> None:
        context.heartbeat.beat(0)
        if world.sum_over_ranks(context.stop.received) != [0]:
            raise InterruptedError  # on all ranks

    try:
        with closing(learner.build_eval_loader(learner.images.train)) as loader, learner.autocast:
            features = _compute_features(context, loader, check)
        log_bad_samples(context, loader.bad_samples)
        context.log(f"features of the training images computed in {monotonic() - began:.0f} s")
        regression = LogisticRegression(features, heads[0].out_features, world, check)
        strength = regression.fit()
    except InterruptedError:
        return False
    context.stop.effect = effect
    with torch.no_grad():
        for head in heads:
            head.weight.copy_(regression.point[:, :-1])
            head.bias.copy_(regression.point[:, -1])
    context.log(f"classifier fitted after {monotonic() - began:.0f} s, with L2 of strength {strength:g}")
    return True


def _compute_features(context: TrainContext, loader: EvalLoader, check: Callable[[], None]) -> list[Tensor]:
    """Return features, classes and numbers of this rank's images, without damaged ones. Collective."""
    network, world, images = context.state.model.eval(), context.world, len(context.data.train)
    inputs, columns = list[Tensor](), list[tuple[Tensor, ...]]()
    head = linear_head(network, context.state.heads)
    hook = head.register_forward_pre_hook(lambda _, given: inputs.append(given[0].float()))
    show = ThroughputLine("training images have features", shown=world.is_rank_zero)
    show(0, images)
    starts = range(0, -(-images // world.size), loader.batch_size)
    for done, batch in zip_longest(starts, loader):
        check()
        if batch is not None:  # the last batch of a rank with an image less may be missing
            with torch.no_grad():
                network(batch.images)
            usable, numbers = batch.classes != NO_CLASS, torch.from_numpy(batch.indices)
            columns.append((inputs.pop()[usable], batch.classes[usable], numbers.to(usable.device)[usable]))
        show(min(images, (done + loader.batch_size) * world.size), images)
    hook.remove()
    start_training(network)
    return [torch.cat(column) for column in zip(*columns, strict=True)]


class LogisticRegression:
    """Classes as a function of the features of all ranks; the weights, and a column of biases, are `point`.

    Rank 0 alone searches for the optimum: in rounding, a processor of another kind would search elsewhere.
    """

    def __init__(self, columns: list[Tensor], classes: int, world: World, check: Callable[[], None]) -> None:
        """`columns` are features (images, features), classes and numbers of the images of this rank."""
        values, (_, self._labels, numbers) = columns[0].double(), columns
        self._world, self._check, self._selecting = world, check, (numbers % _SELECTING == 0).double()
        sums = world.sum(torch.cat([values.sum(0), values.new_tensor([len(values)])]), "features")
        self._mean = sums[:-1] / sums[-1]
        variances = world.sum((values - self._mean).square().sum(0), "features") / sums[-1]
        if not variances.isfinite().all():
            raise UserError("The features of the network are not finite. Check the weights, or --precision.")
        deviations = variances.sqrt()  # in features that are almost constant, rounding must not become large
        self._scale = deviations.clamp(min=1e-3 * deviations.max().item() or 1.0)
        self._features = (values - self._mean) / self._scale
        self.point = values.new_zeros(classes, len(self._mean) + 1)
        self._found = values.new_zeros(1)  # whether rank 0 has found the optimum

    def fit(self) -> float:
        """Find the optimum for the strength at which held-out images have the least loss; return that."""
        best, chosen = float("inf"), _STRENGTHS[0]
        for strength in _STRENGTHS:
            self._minimize(strength, 1 - self._selecting)
            loss = self._mean_loss(self._selecting)[0].item()
            if loss >= best:
                break
            best, chosen = loss, strength
        self._minimize(chosen, torch.ones_like(self._selecting))
        self.point[:, :-1] /= self._scale  # for features as the network gives them
        self.point[:, -1] -= self.point[:, :-1] @ self._mean
        return chosen

    def _minimize(self, strength: float, counted: Tensor) -> None:
        """Move to the minimum of the mean loss, plus half the strength times the squared norm of weights."""

        def penalized_loss() -> float:
            found, weights = self._mean_loss(counted), self.point[:, :-1]
            self.point.grad = found[1:].view_as(self.point)
            self.point.grad[:, :-1] += strength * weights
            return found[0].item() + strength / 2 * weights.square().sum().item()

        self._found.zero_()
        if self._world.is_rank_zero:
            search = torch.optim.LBFGS(
                [self.point], max_iter=200, tolerance_grad=1e-5, line_search_fn="strong_wolfe"
            )
            search.step(penalized_loss)  # type: ignore[no-untyped-call]
            self._found.fill_(1)
            self._mean_loss(counted)  # tells the others
        while not self._found:
            self._mean_loss(counted)

    def _mean_loss(self, counted: Tensor) -> Tensor:
        """Return the mean loss of all ranks' `counted` images at the point of rank 0, and its gradient."""
        self._check()
        self._world.broadcast_([self._found, self.point])
        point = self.point.detach().requires_grad_()
        logits = F.linear(self._features, point[:, :-1], point[:, -1])
        loss = (F.cross_entropy(logits, self._labels, reduction="none") * counted).sum()
        (gradient,) = torch.autograd.grad(loss, point)
        sums = torch.cat([torch.stack([counted.sum(), loss.detach()]), gradient.flatten()])
        self._world.sum(sums, "classifier")
        return sums[1:] / sums[0].clamp(min=1)
