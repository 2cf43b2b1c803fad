"""Label maps as in the published training, and pairs of our networks and the published ones to compare."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import horovod_volo.models.lvvit as our_lvvit
import horovod_volo.models.volo as our_volo
from horovod_volo.config.task_settings import Objective
from horovod_volo.core.batch import LabelMaps, Labels
from horovod_volo.models.blocks import DropPathSample, sample_drop_path
from horovod_volo.models.build import build_model
from horovod_volo.objective.loss import build_loss
from horovod_volo.objective.mixing import Box
from horovod_volo.objective.soft_target import SoftTarget
from tests.published.checkouts import PublishedCode
from tests.published.conftest import compare
from tests.unit.network_samples import perturbed, random_images

CLASSES, SIDE = 1000, 14
_K, _CELLS = 5, (18, 18)


def box_on(grid: int) -> Box:
    """Return a box that is neither square nor centred, so that swapped rows and columns change the result."""
    return Box(top=grid * 3 // 14, left=grid * 5 // 14, height=grid // 2, width=grid * 2 // 7, grid=grid)


BOX = box_on(SIDE)  # 7 x 4 cells at (3, 5)


def labels_of(batch: int, seed: int, cells: tuple[int, int] = _CELLS, num_classes: int = CLASSES) -> Labels:
    """Draw label maps with half-precision logits, crops, and classes."""
    random = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(batch, _K, *cells, generator=random) + 6
    scores = scores.sort(dim=1, descending=True).values.half().float()
    # Neighbouring cells often have the same class, so the ids of an image are from a few classes.
    few = torch.rand(batch, num_classes, generator=random).argsort(dim=1)[:, : 2 * _K]  # (batch, 10)
    order = torch.rand(batch, 2 * _K, *cells, generator=random).argsort(dim=1)[:, :_K]
    ids = few.gather(1, order.flatten(1)).view_as(order)
    extents = 0.1 + 0.9 * torch.rand(batch, 2, generator=random)
    corners = (1 - extents) * torch.rand(batch, 2, generator=random)
    classes = torch.randint(num_classes, (batch,), generator=random)
    return Labels(classes, LabelMaps(scores, ids, torch.cat([corners, extents], dim=1)))


def published_form(labels: Labels) -> Tensor:
    """Return the labels of a batch in the format of the published loader, (batch, 3, k, height, width)."""
    scores = labels.maps.scores
    maps = torch.stack([scores, labels.maps.ids.float(), torch.zeros_like(scores)], dim=1)
    maps[:, 2, 0, 0, :4] = labels.maps.boxes
    maps[:, 2, 0, 0, 5] = labels.classes.float()
    return maps


@cache
def published_target(
    published: PublishedCode, batch: int, seed: int, side: int = SIDE, cells: tuple[int, int] = _CELLS
) -> Tensor:
    """Return the published code's dense target of random labels, (batch, classes, 2 + tokens)."""
    return published_target_of(published, labels_of(batch, seed, cells), side)


def published_target_of(
    published: PublishedCode,
    labels: Labels,
    side: int,
    num_classes: int = CLASSES,
    precision: torch.dtype = torch.float32,
) -> Tensor:
    """Return the published code's dense target of these labels, computed in this precision."""
    maps_of = published.targets.get_featuremaps
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published.targets, "get_featuremaps", lambda *a, **k: maps_of(*a, **k).to(precision))
        target: Tensor = published.targets.mixup_target(
            published_form(labels), num_classes, smoothing=0.1, device="cpu", label_size=side
        )
    return target


def dense(target: SoftTarget, num_classes: int = CLASSES) -> Tensor:
    rows = target.uniform.unsqueeze(1).repeat(1, num_classes)
    return rows.scatter_add(1, target.ids, target.weights)


Draw = tuple[float, Tensor]  # the rate of a branch, and the images that keep it


@contextmanager
def record_draws_of_ours() -> Iterator[list[Draw]]:
    """Record the draws of one of our networks, branch by branch."""
    draws: list[Draw] = []

    def record(rates: Sequence[float], tokens: Tensor, seed: int | None) -> list[DropPathSample]:
        samples = sample_drop_path(rates, tokens, seed)
        all_images = torch.arange(len(tokens))
        draws.extend(
            (rate, all_images if sample.rows is None else sample.rows)
            for rate, sample in zip(rates, samples, strict=True)
            if rate
        )
        return samples

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(our_volo, "sample_drop_path", record)
        patch.setattr(our_lvvit, "sample_drop_path", record)
        yield draws


@contextmanager
def use_draws_in_published(published: PublishedCode, draws: list[Draw]) -> Iterator[None]:
    """Replace the draws of published networks by these."""
    branches = iter(draws)

    def forward(module: Any, branch: Tensor) -> Tensor:
        rate, rows = next(branches)
        assert module.drop_prob == pytest.approx(rate, rel=1e-6)
        mask = torch.zeros(len(branch), *[1] * (branch.ndim - 1)).index_fill(0, rows, 1.0)
        return branch * mask / (1.0 - module.drop_prob)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(published.volo.DropPath, "forward", forward)
        yield
    assert next(branches, None) is None


NAMES = [f"volo_d{size}" for size in range(1, 6)] + [f"lvvit_{size}" for size in "tsml"]


@dataclass(frozen=True)
class Pair:
    """One of our networks and the published one with the same weights.

    Each has the loss of its repository's own command: VOLO's includes the true class, LV-ViT's does not.
    """

    name: str
    ours: Any
    theirs: Any

    @property
    def is_lvvit(self) -> bool:
        """Return whether the network is from TokenLabeling's repository."""
        return self.name.startswith("lvvit")

    @property
    def objective(self) -> Objective:
        return Objective(
            token_label=True,
            token_label_data="maps",
            label_geometry="reference",
            ground_truth=not self.is_lvvit,
            dense_weight=1.0 if self.is_lvvit else 0.5,
        )

    def our_loss(self, images: Tensor, labels: Labels, box: Box) -> Tensor:
        logits = self.ours.train().training_logits(images, box.swap_tokens, 0)
        return build_loss(self.objective, CLASSES, box.grid)(*logits, labels, box).total

    def published_loss(self, published: PublishedCode, images: Tensor, target: Tensor, box: Box) -> Tensor:
        if self.is_lvvit:
            criterion = published.lvvit_losses.TokenLabelCrossEntropy(dense_weight=1.0)
        else:
            criterion = published.volo_losses.TokenLabelGTCrossEntropy(dense_weight=0.5)
        with published.fixed_box(self.name, box):
            loss: Tensor = criterion(self.theirs.train()(images), target)
        return loss


def pair_of(published: PublishedCode, name: str, *, img_size: int = 224, drop_path: float = 0.0) -> Pair:
    """Build one of our networks and load its weights into the published one."""
    torch.manual_seed(0)
    ours = perturbed(build_model(name, img_size=img_size, num_classes=CLASSES, drop_path=drop_path))
    theirs = published.network(name, img_size=img_size, drop_path=drop_path)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return Pair(name, ours, theirs)


def compare_training(
    published: PublishedCode, pair: Pair, batch: int, box: Box, *, img_size: int = 224
) -> list[Draw]:
    """Compare the loss of a batch, its gradients, and the statistics of batch norm; return our draws."""
    labels, target = labels_of(batch, seed=3), published_target(published, batch, 3, box.grid)
    own, other = (random_images(batch, img_size).requires_grad_() for _ in range(2))
    with record_draws_of_ours() as draws:
        ours = pair.our_loss(own, labels, box)
    ours.backward()
    with use_draws_in_published(published, draws):
        theirs = pair.published_loss(published, other, target, box)
    theirs.backward()
    what = f"{pair.name}, {batch} of {img_size} px"
    compare(f"{what}, loss", ours, theirs)
    assert draws or all(gradient.any() for gradient in gradients(pair.theirs, other).values())
    compare_gradients(f"{what}, gradients", gradients(pair.ours, own), gradients(pair.theirs, other))
    compare_statistics(what, pair.ours, pair.theirs)
    return draws


def gradients(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Return the gradients of all parameters and of the images, with zeros for missing ones."""
    named = dict(model.named_parameters()) | {"images": images}
    return {
        name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        for name, tensor in named.items()
    }


def compare_gradients(what: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Compare the norms of differences, relative to those of the published tensors, in total and for each."""
    assert ours.keys() == theirs.keys()
    norms = {name: torch.linalg.vector_norm(tensor).item() for name, tensor in theirs.items()}
    distances = {name: torch.linalg.vector_norm(ours[name] - theirs[name]).item() for name in theirs}
    relative = {name: distances[name] and distances[name] / (norms[name] or 1e-30) for name in norms}
    farthest = max(relative, key=relative.__getitem__)
    whole = math.hypot(*distances.values()) / math.hypot(*norms.values())
    nothing = torch.tensor(0.0)
    compare(f"{what}, relative distance", torch.tensor(whole), nothing)
    compare(f"{what}, relative distance of {farthest}", torch.tensor(relative[farthest]), nothing)


def compare_statistics(what: str, ours: nn.Module, theirs: nn.Module) -> None:
    """Compare the running averages of batch norm and the number of their updates."""
    own, other = (dict(model.named_buffers()) for model in (ours, theirs))
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        assert torch.allclose(tensor, other[name], rtol=1e-5, atol=1e-6), f"{what}, {name}"
