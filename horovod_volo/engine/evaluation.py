"""Exact accuracy on the held-out images: counts over all ranks, every image once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.cluster.world import World
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.data.loader import NO_CLASS, EvalBatch, EvalLoader
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.damage import log_bad_samples

Scores = dict[str, float | int]
Note = Callable[[EvalBatch, Tensor], object]  # of a batch and the class each image is taken for (batch,)


class Counts(NamedTuple):
    """What was counted on all ranks."""

    top1: int  # right at first
    top5: int  # right among five
    loss: float  # summed
    seen: int
    absent: int  # damaged

    def scores(self) -> Scores:
        """Return top-1 and top-5 in per cent, the mean loss, and the images counted."""
        means = {"top1": 100 * self.top1, "top5": 100 * self.top5, "loss": self.loss}
        images = {"images": self.seen, "bad_samples": self.absent}
        return {name: value / self.seen for name, value in means.items()} | images


def evaluate(context: TrainContext) -> Scores:
    """Evaluate the raw and the averaged weights. Collective: every rank calls this."""
    scores = evaluate_model(context, context.state.model)
    for name, model in context.state.average.models().items():
        scores |= {
            f"{name}_{key}": value
            for key, value in evaluate_model(context, model).items()
            if key not in ("images", "bad_samples")
        }
    context.state.model.train()
    return scores


def evaluate_model(context: TrainContext, model: nn.Module) -> Scores:
    """Return top-1 and top-5 in per cent, the mean loss, and the images counted. Collective."""
    model.eval()
    with torch.inference_mode(), context.autocast:
        counts = count_right(model, context.eval_loader, context.resources.device)
    totals = total(counts, context.images.held_out, context.world)
    log_bad_samples(context, context.eval_loader.bad_samples)
    return totals.scores()


def total(counts: Tensor, catalog: Catalog, world: World) -> Counts:
    """Add every rank's counts; each image of the catalog must be among them. Collective."""
    top1, top5, loss, seen, absent = world.sum_over_ranks(*counts.tolist())
    if seen + absent != len(catalog):
        raise RuntimeError(f"evaluation saw {seen + absent:.0f} images of {len(catalog)}")
    if not seen:
        raise UserError(f"none of the images in {catalog.source} can be read.")
    return Counts(int(top1), int(top5), loss, int(seen), int(absent))


def count_right(
    model: nn.Module,
    stream: EvalLoader,
    device: torch.device,
    note: Note = lambda batch, taken: None,  # noqa: ARG005
) -> Tensor:
    """Count over this rank's images: right at first, right among five, summed loss, seen, damaged."""
    counts = torch.zeros(5, dtype=torch.float64, device=device)
    for batch in stream:
        logits = model(batch.images).float()  # (batch, classes)
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (batch, 5)
        hits = best == batch.classes[:, None]
        loss = F.cross_entropy(logits, batch.classes, reduction="sum", ignore_index=NO_CLASS)
        absent = (batch.classes == NO_CLASS).sum()
        counts += torch.stack([hits[:, 0].sum(), hits.any(dim=1).sum(), loss, len(logits) - absent, absent])
        note(batch, best[:, 0])
    return counts
