"""Exact accuracy on the validation images: every image counts once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.core.batch import NO_CLASS, EvalBatch
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import ImageList
from horovod_volo.data.loader import EvalLoader
from horovod_volo.engine.confusions import ConfusionRecorder
from horovod_volo.engine.task import Beat, Metrics

# Given a batch, its predicted classes (batch,) and their probabilities (batch,).
OnBatch = Callable[[EvalBatch, Tensor, Tensor], object]


class EvalCounts(NamedTuple):
    """Sums over the images of all ranks."""

    top1: int  # images whose class is predicted first
    top5: int  # images whose class is among the first five predictions
    loss_sum: float
    images: int
    bad_samples: int  # damaged images, which are in none of the other sums

    def metrics(self) -> Metrics:
        """Return top-1 and top-5 in per cent, the mean loss, and the numbers of images."""
        return {
            "top1": 100 * self.top1 / self.images,
            "top5": 100 * self.top5 / self.images,
            "loss": self.loss_sum / self.images,
            "images": self.images,
            "bad_samples": self.bad_samples,
        }


def measure_model(
    model: nn.Module,
    beat: Beat,
    *,
    loader: EvalLoader,
    catalog: ImageList,
    world: World,
    device: torch.device,
    arithmetic: torch.autocast,
    confusions: ConfusionRecorder,
) -> Metrics:
    """Return a model's metrics on the validation images. Collective: every rank calls this."""
    collector = PredictionCollector()

    def on_batch(batch: EvalBatch, predictions: Tensor, probabilities: Tensor) -> None:
        collector.add(batch, predictions, probabilities)
        beat(len(batch.indices))

    with torch.inference_mode(), arithmetic:
        rank_counts = count_correct(model, loader, device, on_batch)
    counts = sum_counts(rank_counts, catalog, world)
    confusions.add(*collector.gather(world, len(catalog)))
    return counts.metrics()


def count_correct(
    model: nn.Module,
    loader: EvalLoader,
    device: torch.device,
    on_batch: OnBatch = lambda batch, predictions, probabilities: None,  # noqa: ARG005
) -> Tensor:
    """Return this rank's sums in the order of EvalCounts (5,); they stay on the device."""
    counts = torch.zeros(5, dtype=torch.float64, device=device)
    for batch in loader:
        logits = model(batch.images).float()  # (batch, classes)
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (batch, 5)
        correct = best == batch.classes[:, None]
        loss = F.cross_entropy(logits, batch.classes, reduction="sum", ignore_index=NO_CLASS)
        bad = (batch.classes == NO_CLASS).sum()
        counts += torch.stack([correct[:, 0].sum(), correct.any(dim=1).sum(), loss, len(logits) - bad, bad])
        on_batch(batch, best[:, 0], logits.softmax(dim=1).amax(dim=1))
    return counts


def sum_counts(counts: Tensor, catalog: ImageList, world: World) -> EvalCounts:
    """Sum the ranks' counts; raise RuntimeError unless they cover the catalog exactly. Collective."""
    top1, top5, loss_sum, images, bad_samples = world.sum_over_ranks(*counts.tolist())
    if images + bad_samples != len(catalog):
        raise RuntimeError(f"evaluation covered {images + bad_samples:.0f} images of {len(catalog)}")
    if not images:
        raise UserError(f"none of the images in {catalog.source} can be read.")
    return EvalCounts(int(top1), int(top5), loss_sum, int(images), int(bad_samples))


class PredictionCollector:
    """Collects the predicted classes of this rank's images on the device, without synchronising with it."""

    def __init__(self) -> None:
        self.done = 0  # images of this rank
        self._indices: list[NDArray[np.int64]] = []
        self._predictions: list[Tensor] = []
        self._probabilities: list[Tensor] = []

    def add(self, batch: EvalBatch, predictions: Tensor, probabilities: Tensor) -> None:
        """Add the predicted classes of a batch and their probabilities, both (batch,).

        Damaged images get NO_CLASS.
        """
        self._indices.append(batch.indices)
        self._predictions.append(torch.where(batch.classes == NO_CLASS, NO_CLASS, predictions))
        self._probabilities.append(probabilities)
        self.done += len(batch.indices)

    def gather(self, world: World, images: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the predicted class of every image of the catalog and its probability, both (images,).

        Collective: every rank calls this.
        """
        own: tuple[NDArray[Any], ...] = (
            np.empty(0, np.int64),
            np.empty(0, np.int32),
            np.empty(0, np.float32),
        )
        if self._indices:
            own = (
                np.concatenate(self._indices),
                torch.cat(self._predictions).to(torch.int32).cpu().numpy(),
                torch.cat(self._probabilities).float().cpu().numpy(),
            )
        predictions, probabilities = np.full(images, NO_CLASS), np.zeros(images, np.float32)
        for of_rank, rank_predictions, rank_probabilities in world.allgather_object(own):
            predictions[of_rank] = rank_predictions
            probabilities[of_rank] = np.nan_to_num(rank_probabilities)
        return predictions, probabilities
