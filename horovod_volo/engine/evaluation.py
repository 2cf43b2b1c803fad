"""Exact accuracy on the held-out images: counts over all ranks, every image once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from horovod_volo.config.errors import UserError
from horovod_volo.data.stream import NO_CLASS, EvalStream
from horovod_volo.engine.damage import tell_damage
from horovod_volo.engine.job import Job

Scores = dict[str, float | int]


def evaluate(job: Job) -> Scores:
    """Evaluate the raw and the averaged weights. Collective: every rank calls this."""
    scores = evaluate_model(job, job.state.model)
    for name, model in job.state.average.models().items():
        scores |= {
            f"{name}_{key}": value
            for key, value in evaluate_model(job, model).items()
            if key not in ("images", "bad_samples")
        }
    job.state.model.train()
    return scores


def evaluate_model(job: Job, model: nn.Module) -> Scores:
    """Return top-1 and top-5 in per cent, the mean loss, and the images counted. Collective."""
    model.eval()
    with torch.inference_mode(), job.autocast:
        counts = count_right(model, job.eval_stream, job.share.device)
    top1, top5, loss, seen, absent = job.world.total(*counts.tolist())
    if seen + absent != len(job.images.held_out):
        raise RuntimeError(f"evaluation saw {seen + absent:.0f} images of {len(job.images.held_out)}")
    if not seen:
        raise UserError(f"none of the images in {job.images.held_out.source} can be read.")
    tell_damage(job, job.eval_stream.damage)
    scores = {"top1": 100 * top1 / seen, "top5": 100 * top5 / seen, "loss": loss / seen}
    return scores | {"images": int(seen), "bad_samples": int(absent)}


def count_right(model: nn.Module, stream: EvalStream, device: torch.device) -> Tensor:
    """Count over this rank's images: right at first, right among five, summed loss, seen, damaged."""
    counts = torch.zeros(5, dtype=torch.float64, device=device)
    for batch in stream:
        logits = model(batch.images).float()  # (batch, classes)
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices  # (batch, 5)
        hits = best == batch.classes[:, None]
        loss = F.cross_entropy(logits, batch.classes, reduction="sum", ignore_index=NO_CLASS)
        absent = (batch.classes == NO_CLASS).sum()
        counts += torch.stack([hits[:, 0].sum(), hits.any(dim=1).sum(), loss, len(logits) - absent, absent])
    return counts
