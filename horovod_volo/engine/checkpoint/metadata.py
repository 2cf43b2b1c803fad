"""The settings in a checkpoint's metadata that a resumed run must share with the run that saved it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from horovod_volo.config.data_settings import Data
from horovod_volo.config.derived import Derived
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.data.image_decoder import image_decoder
from horovod_volo.engine.task import Samples, Task
from horovod_volo.models.weights_header import statistics_of_run

_OF_THE_MODEL = "of the model"


def run_metadata(config: Config, derived: Derived, task: Task, train: Samples) -> dict[str, Any]:
    """Return the settings that samples, their order and the tensors of the state depend on."""
    return {
        "model": config.model.model,
        "img_size": config.model.img_size,
        "seed": config.run.seed,
        "images": len(train),
        "classes": len(train.classes),
        "image_list": train.digest[:12],
        "block_shuffle": config.data.block_shuffle,
        "balance": config.data.balance,
        "shuffle_window": config.data.shuffle_window,
        "global_batch": derived.global_batch,
        "image_decoder": image_decoder(config.data.image_decoder).name,
        "precision": config.model.precision,
        "averaged": bool(config.update.ema_decay),
        "ema_warmup": config.update.ema_warmup,
        "optimizer": config.update.opt,
        "task": config.model.task,
        "mean and std": _statistics(config),
        "freeze": config.model.freeze,
        **task.metadata(config),
    }


def _statistics(config: Config) -> str:
    """Return the mean and std of the run's pixels."""
    statistics = statistics_of_run(config.data, config.model.model)
    own = statistics == statistics_of_run(Data(), config.model.model)
    return _OF_THE_MODEL if own else statistics.describe()


def check_metadata(saved: dict[str, Any], current: dict[str, Any], checkpoint: Path, ranks: int) -> None:
    """Raise UserError if the run that saved `checkpoint` had other settings than the current one."""
    # Earlier versions did not save these: averages always had a warm-up, models always an auxiliary head.
    # Only DALI decoded images, with the model's mean and std; nothing was frozen, nor drawn more often.
    earlier = {
        "ema_warmup": saved.get("averaged", False),
        "task": "classification",
        "image_decoder": "dali",
        "mean and std": _OF_THE_MODEL,
        "balance": 0.0,
        "freeze": "",
    }
    saved = earlier | {"aux_head": current.get("aux_head")} | saved
    for name, value in current.items():
        if saved.get(name) != value:
            raise UserError(
                f"Checkpoint {checkpoint} has {name} {saved.get(name)}, this run has {value}, so it cannot "
                f"resume from it. {_remedy(name, saved.get(name), ranks)}"
            )


def _remedy(name: str, saved: Any, ranks: int) -> str:
    if name == "model":
        return f"Give --model {saved}."
    if name == "global_batch" and saved % ranks == 0:
        return (
            f"With {ranks} ranks, batch size x accumulation must be {saved // ranks}: "
            f"--global-batch {saved} sets both."
        )
    if name == "global_batch":
        return f"Start a number of ranks that divides {saved}."
    if name == "mean and std":
        return "Drop --mean and --std." if saved == _OF_THE_MODEL else f"Give {saved}."
    if name == "ema_warmup":
        return "Give --ema-warmup." if saved else "Drop --ema-warmup."
    if name == "freeze":
        same = f"Give --freeze {saved}" if saved else "Drop --freeze"
        return f"{same}, or start a new run with --finetune."
    if name == "aux_head":
        labels = "--token-label, and --dense-weight above 0" if saved else "--no-token-label"
        return f"Give {labels}, or start a new run with --finetune."
    if name == "image_decoder":
        return f"Give --image-decoder {saved}, or start a new run with --finetune."
    if name in ("images", "image_list"):
        return "Restore the training images as they were, or start a new run with --finetune."
    return "Give the settings of its resolved.toml, or start a new run with --finetune."
