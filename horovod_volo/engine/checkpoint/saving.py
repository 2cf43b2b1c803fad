"""Save checkpoints, and evaluations beside the checkpoint that they evaluate.

Rank 0 writes.
Invariant: only a state that is finite, and equal on all ranks to the last bit, is saved. A checkpoint that
cannot be trained from must not replace one that can.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from horovod_volo.cluster.world import AllRanksError
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.engine.checkpoint.files import (
    CHECKPOINTS,
    StateDicts,
    checkpoint_path,
    delete_old_checkpoints,
    update_link,
    write_checkpoint,
)
from horovod_volo.engine.checkpoint.metadata import run_metadata
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.evaluation import Scores

_EVALUATION = "evaluation.json"
_AFTER_DIVERGENCE = "Lower --lr or lengthen --warmup-epochs, and resume from the last checkpoint."


def save_checkpoint(context: TrainContext) -> None:
    """Save a checkpoint of the current step. Collective: every rank calls this."""
    check_losses(context, context.world.sum_over_ranks(*context.meter.sums().values()))
    context.world.assert_identical(context.state.replicated_tensors(), "Weights or optimizer state")
    tensors = context.state.full_state_dict()
    context.world.run_on_rank_zero(lambda: _write_checkpoint(context, tensors))


def check_losses(context: TrainContext, losses: Sequence[float]) -> None:
    """Raise UserError if losses that were summed over ranks are not finite."""
    if not all(map(math.isfinite, losses)):
        raise AllRanksError(f"The loss is not finite at step {context.state.step}. {_AFTER_DIVERGENCE}")


def _check_tensors(tensors_by_file: StateDicts, step: int) -> None:
    """Raise UserError if a tensor is not finite; by now gradients that are not have reached the weights."""
    for tensors in tensors_by_file.values():
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise UserError(f"{name} is not finite at step {step}, and is not saved. {_AFTER_DIVERGENCE}")


def _write_checkpoint(context: TrainContext, tensors: StateDicts) -> None:
    _check_tensors(tensors, context.state.step)
    metadata = run_metadata(context.config, context.derived, context.images.train)
    metadata["scaler"] = context.state.scaler.state_dict()
    saved = write_checkpoint(_folder(context), context.state.step, tensors, metadata)
    delete_old_checkpoints(saved, context.config.run.keep_checkpoints)


def save_evaluation(context: TrainContext, scores: Scores) -> None:
    """Log the scores, save them in the current step's checkpoint, and update the link `best`. Collective."""
    step = context.state.step
    epochs_done, _ = context.derived.epoch_of(step)
    context.logger.log_evaluation(
        step, {"epoch": epochs_done - 1, "images_seen": step * context.derived.global_batch, **scores}
    )
    context.logger.log(_format_scores(scores, epochs_done))
    context.world.run_on_rank_zero(lambda: _write_evaluation(context, scores))


def _write_evaluation(context: TrainContext, scores: Scores) -> None:
    checkpoint, best = _current_checkpoint(context), _folder(context) / "best"
    try:
        with atomic_write(checkpoint / _EVALUATION) as file:
            file.write(json.dumps(scores).encode())
        if not best.exists() or _top1(checkpoint) > _top1(best):
            update_link(best, checkpoint)
    except OSError as error:
        raise UserError(
            f"The evaluation of {checkpoint} could not be written: {error.strerror}. Checkpoints are intact: "
            "free disk space or fix the folder, then restart with --resume auto."
        ) from None


def has_evaluation(context: TrainContext) -> bool:
    """Return whether the current step's checkpoint has been evaluated. Collective: every rank calls this."""
    return bool(context.world.broadcast_object((_current_checkpoint(context) / _EVALUATION).exists()))


def _format_scores(scores: Scores, epochs_done: int) -> str:
    averaged = f", averaged weights {scores['ema_top1']:.2f} %" if "ema_top1" in scores else ""
    return (
        f"after epoch {epochs_done}: top-1 {scores['top1']:.2f} %, top-5 {scores['top5']:.2f} %{averaged} "
        f"on {scores['images']} held-out images"
    )


def _top1(checkpoint: Path) -> float:
    """Return the better top-1 of raw and averaged weights; -1 if the checkpoint has no evaluation."""
    file = checkpoint / _EVALUATION
    if not file.exists():  # `best` was saved again, after a resume from an earlier checkpoint
        return -1.0
    scores = json.loads(file.read_text(encoding="utf-8"))
    return float(max(scores["top1"], scores.get("ema_top1", 0.0)))


def _folder(context: TrainContext) -> Path:
    return context.folder / CHECKPOINTS


def _current_checkpoint(context: TrainContext) -> Path:
    return checkpoint_path(_folder(context), context.state.step)
