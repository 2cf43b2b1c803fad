"""What a run keeps of itself: its state as checkpoints, and their evaluations beside them.

Rank 0 writes; before it does, the state must agree on all ranks bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from horovod_volo.config.derived import Derived
from horovod_volo.config.rules import trains_aux_head
from horovod_volo.config.schema import Config
from horovod_volo.data.images.catalog import Catalog
from horovod_volo.engine.checkpoint import Files, checkpoint_path, point, prune, save_checkpoint
from horovod_volo.engine.evaluation import Scores
from horovod_volo.engine.job import Job
from horovod_volo.files.whole import whole_file

_EVALUATION = "evaluation.json"


def keep(job: Job) -> None:
    """Save the state of the step it stands at. Collective: every rank calls this."""
    job.world.assert_same(job.state.common(), "Weights or optimizer state")
    files = job.state.whole()
    job.world.on_main(lambda: _write(job, files))


def _write(job: Job, files: Files) -> None:
    facts = checkpoint_facts(job.config, job.derived, job.images.train)
    facts["scaler"] = job.state.scaler.state_dict()
    saved = save_checkpoint(_folder(job), job.state.step, files, facts)
    prune(saved, job.config.run.keep_checkpoints)


def keep_evaluation(job: Job, scores: Scores) -> None:
    """Tell the scores, put them beside the checkpoint they are of, and let `best` follow."""
    step = job.state.step
    epochs_done, _ = job.derived.epoch_of(step)
    job.tracker.evaluation(
        step, {"epoch": epochs_done - 1, "images_seen": step * job.derived.global_batch, **scores}
    )
    job.tracker.say(_sentence(scores, epochs_done))
    if job.world.is_main:
        checkpoint = _checkpoint_of_step(job)
        with whole_file(checkpoint / _EVALUATION) as file:
            file.write(json.dumps(scores).encode())
        best = _folder(job) / "best"
        if not best.exists() or _score(checkpoint) > _score(best):
            point(best, checkpoint)


def was_evaluated(job: Job) -> bool:
    """Say whether the state's checkpoint has been evaluated. Collective: every rank calls this."""
    return bool(job.world.share((_checkpoint_of_step(job) / _EVALUATION).exists()))


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


def _folder(job: Job) -> Path:
    return job.folder / "checkpoints"


def _checkpoint_of_step(job: Job) -> Path:
    return checkpoint_path(_folder(job), job.state.step)


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
        "precision": config.exchange.precision,
        "averaged": bool(config.update.ema_decay),
        "ema_warmup": config.update.ema_warmup,
        "aux_head": trains_aux_head(config),
        "optimizer": config.update.opt,
    }
