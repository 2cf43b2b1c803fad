"""Exact accuracy on the validation images: every image counts once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.core.batch import NO_CLASS, EvalBatch
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.image_list import ImageList
from horovod_volo.data.loader import EvalLoader
from horovod_volo.engine.confusions import ConfusionRecorder
from horovod_volo.engine.predictions import PredictionCollector
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
