"""Resume from a checkpoint: select it, check that it belongs to this run, and load it on all ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from horovod_volo.cluster.world import World
from horovod_volo.config.derived import derive
from horovod_volo.config.schema import Config
from horovod_volo.core.errors import UserError
from horovod_volo.engine.checkpoint.files import (
    StateDicts,
    find_checkpoint,
    find_damage,
    has_checkpoint,
    read_metadata,
    read_tensors,
)
from horovod_volo.engine.checkpoint.metadata import check_metadata, run_metadata
from horovod_volo.engine.context import run_folder
from horovod_volo.engine.state import TrainState
from horovod_volo.engine.task import Samples, Task
from horovod_volo.models.weights import AUX_HEAD


def checkpoint_to_resume(config: Config, world: World, task: Task, train: Samples) -> Path | None:
    """Return the checkpoint to resume from, or None for a new run. Collective: every rank calls this.

    Its metadata are checked against the settings here, before a model is built.
    """
    return world.run_on_rank_zero(partial(_select_and_check, config, world.size, task, train))


def _select_and_check(config: Config, ranks: int, task: Task, train: Samples) -> Path | None:
    checkpoint = _select(config)
    if checkpoint:
        current = run_metadata(config, derive(config, ranks=ranks, images=len(train)), task, train)
        check_metadata(read_metadata(checkpoint), current, checkpoint, ranks)
    return checkpoint


def _select(config: Config) -> Path | None:
    folder = run_folder(config)
    if config.run.resume == "auto":
        return find_checkpoint(str(folder)) if has_checkpoint(folder) else None
    if config.run.resume:
        checkpoint = find_checkpoint(config.run.resume)
        _check_continues(folder, checkpoint)
        return checkpoint
    if has_checkpoint(folder):
        raise UserError(
            f"{folder} already holds a run. Add --resume auto to continue it, or give this run another "
            "--name."
        )
    return None


def _check_continues(folder: Path, checkpoint: Path) -> None:
    """Raise UserError if the run folder holds checkpoints of another run, or later ones of this run."""
    if has_checkpoint(folder):
        newest = find_checkpoint(str(folder))
        if newest.resolve() != checkpoint.resolve():
            raise UserError(
                f"{folder} already holds a run up to {newest.name}, which does not continue {checkpoint}. "
                "Give this run another --name, or delete that run's later checkpoints."
            )


def restore_state(
    state: TrainState, checkpoint: Path | None, world: World, step: int | None = None
) -> list[str]:
    """Load the checkpoint, if any, and copy rank 0's state to all ranks. Collective: every rank calls this.

    The state is that after `step`, or after the step of the checkpoint. Return warnings about later
    checkpoints that are damaged, and about tensors that were not loaded.
    """
    # Only rank 0 reads. load_full_state_dict broadcasts single tensors: one object may become too large.
    saved = world.run_on_all_ranks(
        lambda: read_tensors(checkpoint) if checkpoint and world.is_rank_zero else {}
    )
    metadata = world.run_on_rank_zero(lambda: read_metadata(checkpoint) if checkpoint else {})
    loaded = _without_aux_head(saved) if getattr(state.model, "aux_head", None) is None else saved
    step = metadata.get("step", 0) if step is None else step
    state.load_full_state_dict(loaded, metadata.get("scaler", {}), step, world)
    world.assert_identical(state.replicated_tensors(), "Weights or optimizer state")
    dropped = sum(map(len, saved.values())) - sum(map(len, loaded.values()))
    warnings = world.run_on_rank_zero(lambda: _damaged_later(checkpoint) if checkpoint else [])
    if dropped:
        warnings.append(f"aux_head of {checkpoint} is left out: this run does not train it")
    return warnings


def _damaged_later(checkpoint: Path) -> list[str]:
    """Return a warning for each damaged checkpoint that is later than the one to resume from."""
    later = [path for path in sorted(checkpoint.parent.glob("step_*")) if path.name > checkpoint.name]
    damage = {path: find_damage(path) for path in later}
    return [
        f"{path} is damaged: {what}; {checkpoint.name} is resumed" for path, what in damage.items() if what
    ]


def _without_aux_head(saved: StateDicts) -> StateDicts:
    """Drop the auxiliary head, which earlier versions saved, untrained, in runs without token labels."""
    return {
        file: {name: tensor for name, tensor in tensors.items() if not name.startswith(AUX_HEAD)}
        for file, tensors in saved.items()
    }
