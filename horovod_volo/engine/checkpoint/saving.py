"""Save checkpoints and the evaluations that belong to them.

Rank 0 writes. Before it does, the state must be the same on all ranks bit for bit, and finite: a checkpoint
that cannot be trained from must not replace one that can.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horovod_volo.cluster.world import AllRanksError
from horovod_volo.config.derived import Derived
from horovod_volo.config.schema import Config
from horovod_volo.config.validation import trains_aux_head
from horovod_volo.core.atomic_file import atomic_write
from horovod_volo.core.errors import UserError
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.engine.checkpoint.files import Files, checkpoint_path, point, prune, write_checkpoint
from horovod_volo.engine.context import TrainContext
from horovod_volo.engine.evaluation import Scores

_EVALUATION = "evaluation.json"
_AFTER_DIVERGENCE = "Lower --lr or lengthen --warmup-epochs, and resume from the last checkpoint."


def save_checkpoint(context: TrainContext) -> None:
    """Save the state of the step it stands at. Collective: every rank calls this."""
    check_losses(context, context.world.sum_over_ranks(*context.window.sums().values()))
    context.world.assert_same(context.state.replicated_tensors(), "Weights or optimizer state")
    files = context.state.full_state_dict()
    context.world.run_on_rank_zero(lambda: _write(context, files))


def check_losses(context: TrainContext, losses: Sequence[float]) -> None:
    """Raise UserError where losses summed over ranks are not finite."""
    if not all(map(math.isfinite, losses)):
        raise AllRanksError(f"The loss is not finite at step {context.state.step}. {_AFTER_DIVERGENCE}")


def _check_tensors(files: Files, step: int) -> None:
    """Raise UserError where a tensor is not finite; a non-finite gradient has made a weight so by now."""
    for tensors in files.values():
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise UserError(f"{name} is not finite at step {step}, and is not saved. {_AFTER_DIVERGENCE}")


def _write(context: TrainContext, files: Files) -> None:
    _check_tensors(files, context.state.step)
    facts = checkpoint_facts(context.config, context.derived, context.images.train)
    facts["scaler"] = context.state.scaler.state_dict()
    saved = write_checkpoint(_folder(context), context.state.step, files, facts)
    prune(saved, context.config.run.keep_checkpoints)


def save_evaluation(context: TrainContext, scores: Scores) -> None:
    """Log the scores, write them beside their checkpoint, and update `best`. Collective."""
    step = context.state.step
    epochs_done, _ = context.derived.epoch_of(step)
    context.logger.log_evaluation(
        step, {"epoch": epochs_done - 1, "images_seen": step * context.derived.global_batch, **scores}
    )
    context.logger.log(_sentence(scores, epochs_done))
    context.world.run_on_rank_zero(lambda: _write_evaluation(context, scores))


def _write_evaluation(context: TrainContext, scores: Scores) -> None:
    checkpoint, best = _checkpoint_of_step(context), _folder(context) / "best"
    try:
        with atomic_write(checkpoint / _EVALUATION) as file:
            file.write(json.dumps(scores).encode())
        if not best.exists() or _score(checkpoint) > _score(best):
            point(best, checkpoint)
    except OSError as error:
        raise UserError(
            f"The evaluation of {checkpoint} could not be written: {error.strerror}. Checkpoints are intact; "
            "make room or mend the folder, then start again with --resume auto."
        ) from None


def was_evaluated(context: TrainContext) -> bool:
    """Say whether the state's checkpoint has been evaluated. Collective: every rank calls this."""
    return bool(context.world.broadcast_object((_checkpoint_of_step(context) / _EVALUATION).exists()))


def _sentence(scores: Scores, epochs_done: int) -> str:
    averaged = f", averaged weights {scores['ema_top1']:.2f} %" if "ema_top1" in scores else ""
    return (
        f"after epoch {epochs_done}: top-1 {scores['top1']:.2f} %, top-5 {scores['top5']:.2f} %{averaged} "
        f"on {scores['images']} held-out images"
    )


def _score(checkpoint: Path) -> float:
    file = checkpoint / _EVALUATION
    if not file.exists():  # saved anew since it was the best
        return -1.0
    scores = json.loads(file.read_text(encoding="utf-8"))
    return float(max(scores["top1"], scores.get("ema_top1", 0.0)))


def _folder(context: TrainContext) -> Path:
    return context.folder / "checkpoints"


def _checkpoint_of_step(context: TrainContext) -> Path:
    return checkpoint_path(_folder(context), context.state.step)


def checkpoint_facts(config: Config, derived: Derived, train: Catalog) -> dict[str, Any]:
    """Return what a run that goes on must share with the one that saved; else its samples are others."""
    return {
        "model": config.model.model,
        "img_size": config.model.img_size,
        "seed": config.run.seed,
        "images": len(train),
        "classes": len(train.classes),
        "image_list": train.digest[:12],
        "block_shuffle": config.data.block_shuffle,
        "shuffle_window": config.data.shuffle_window,
        "global_batch": derived.global_batch,
        "precision": config.model.precision,
        "averaged": bool(config.update.ema_decay),
        "ema_warmup": config.update.ema_warmup,
        "aux_head": trains_aux_head(config),
        "optimizer": config.update.opt,
    }
