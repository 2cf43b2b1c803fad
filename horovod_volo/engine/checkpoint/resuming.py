"""Resume from a checkpoint: select it, check that it belongs to this run, and load it on all ranks.

Its metadata hold the settings that a resumed run must share with the run that saved it.
"""

from functools import partial
from pathlib import Path
from typing import Any

from horovod_volo.cluster.world import World
from horovod_volo.config.data_settings import Data
from horovod_volo.config.derived import Derived, derive
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.data.image_decoder import image_decoder
from horovod_volo.engine.checkpoint import files
from horovod_volo.engine.context import run_folder
from horovod_volo.engine.state import TrainState
from horovod_volo.engine.task import Samples, Task
from horovod_volo.models.weights import AUX_HEAD
from horovod_volo.models.weights_header import statistics_of_run

_OF_THE_MODEL = "of the model"
_OF_FLAGS = {"model", "model_kwargs", "first_size", "freeze", "image_decoder", "seed"}
_OF_FLAGS |= {"aug_repeats", "ema_warmup"}


def checkpoint_to_resume(
    config: Config, world: World, task: Task, train: Samples, begun: bool
) -> Path | None:
    """Return the checkpoint to resume from, or None for a new run. Collective: every rank calls this.

    Its metadata are checked against the settings here, before a model is built. If this run has `begun`, its
    own checkpoint, if there is one, takes the place of what --resume names.
    """
    return world.run_on_rank_zero(partial(_select, config, begun, world.size, task, train))


def _select(config: Config, begun: bool, ranks: int, task: Task, train: Samples) -> Path | None:
    folder = run_folder(config)
    resume = "auto" if begun and files.has_checkpoint(folder) else config.run.resume
    if not resume:
        if files.has_checkpoint(folder):
            raise UserError(
                f"{folder} already holds a run. Add --resume auto to continue it, or give this run another "
                "--name."
            )
        return None
    newest = files.find_checkpoint(str(folder)) if files.has_checkpoint(folder) else None
    checkpoint = newest if resume == "auto" else files.find_checkpoint(resume)
    if checkpoint is None:
        return None
    if newest is not None and newest.resolve() != checkpoint.resolve():
        raise UserError(
            f"{folder} already holds a run up to {newest.name}, which does not continue {checkpoint}. "
            "Give this run another --name, or delete that run's later checkpoints."
        )
    current = run_metadata(config, derive(config, ranks=ranks, images=len(train)), task, train)
    check_metadata(files.read_metadata(checkpoint), current, checkpoint, ranks)
    return checkpoint


def restore_state(
    state: TrainState, checkpoint: Path | None, world: World, step: int | None = None
) -> list[str]:
    """Load the checkpoint, if any, and copy rank 0's state to all ranks. Collective: every rank calls this.

    The state is that after `step`, or after the step of the checkpoint. Return warnings about later
    checkpoints that are damaged, and about tensors that were not loaded.
    """
    # Only rank 0 reads. load_full_state_dict broadcasts single tensors: one object may become too large.
    saved = world.run_on_all_ranks(
        lambda: files.read_tensors(checkpoint) if checkpoint and world.is_rank_zero else {}
    )
    metadata = world.run_on_rank_zero(lambda: files.read_metadata(checkpoint) if checkpoint else {})
    loaded = _without_aux_head(saved) if getattr(state.model, "aux_head", None) is None else saved
    step = metadata.get("step", 0) if step is None else step
    state.load_full_state_dict(loaded, metadata.get("scaler", {}), step, world)
    world.assert_identical(state.replicated_tensors(), "Weights or optimizer state")
    later = world.run_on_rank_zero(lambda: files.find_later(checkpoint) if checkpoint else {})
    warnings = [f"{path} is damaged: {what}; step {step} is resumed" for path, what in later.items() if what]
    if sum(map(len, saved.values())) > sum(map(len, loaded.values())):
        warnings.append(f"aux_head of {checkpoint} is left out: this run does not train it")
    return warnings


def _without_aux_head(saved: files.StateDicts) -> files.StateDicts:
    """Drop the auxiliary head, which earlier versions saved, untrained, in runs without token labels."""
    return {
        file: {name: tensor for name, tensor in tensors.items() if not name.startswith(AUX_HEAD)}
        for file, tensors in saved.items()
    }


def run_metadata(config: Config, derived: Derived, task: Task, train: Samples) -> dict[str, Any]:
    """Return the settings that samples, their order and the tensors of the state depend on."""
    first = config.model.first_size
    return {
        "model": config.model.model,
        "img_size": config.model.img_size,
        "first_size": f"{first} --full-size-after {config.model.full_size_after}" if first else "",
        "seed": config.run.seed,
        "images": len(train),
        "classes": len(train.classes),
        "image_list": train.digest[:12],
        "block_shuffle": config.data.block_shuffle,
        "balance": config.data.balance,
        "aug_repeats": config.data.aug_repeats,
        "model_kwargs": config.model.model_kwargs,
        "shuffle_window": config.data.shuffle_window,
        "global_batch": derived.global_batch,
        "micro_batch": derived.micro_batch,
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
        "aug_repeats": 0,
        "micro_batch": 0,
        "first_size": "",
        "model_kwargs": "",
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
    new_run = "or start a new run with --finetune."
    if name == "global_batch" and saved % ranks:
        return f"Start a number of ranks that divides {saved}."
    if name == "global_batch":
        product = f"With {ranks} ranks, batch size x accumulation must be {saved // ranks}"
        return f"{product}: --global-batch {saved} sets both."
    if name in ("images", "image_list"):
        return f"Restore the training images as they were, {new_run}"
    if name == "mean and std":
        return "Drop --mean and --std." if saved == _OF_THE_MODEL else f"Give {saved}."
    if name == "aux_head":
        labels = "--token-label, and --dense-weight above 0" if saved else "--no-token-label"
        return f"Give {labels}, {new_run}"
    if name in _OF_FLAGS:
        flag, value = "--" + name.replace("_", "-"), "" if saved is True else f" {saved}"
        return f"Give {flag}{value}, {new_run}" if saved or name == "seed" else f"Drop {flag}, {new_run}"
    return f"Give the settings of its resolved.toml, {new_run}"
